"""Plans for rebalancing: which experts to move or replicate so that ranks have similar loads, and whether it pays.

The costs are the time to move experts on a cluster, and the time that uneven loads cost.

`expert_S` is the expert at each position, or E at a free position, as in `rebalance/hill_climb.py`; E is the number of
experts. Where `ranks` are given by their speeds, these are relative to their mean.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.step_times import Step
from moe_jax.rebalance.hill_climb import ExpertPlacement, hill_climb_placement, without_copies
from moe_jax.rebalance.moves import Move, moves_between

Ranks = int | Sequence[float]  # the number of ranks, or their speeds


class MigrationCosts(NamedTuple):
    """Predicted times in seconds."""

    send_s: float  # to send one expert from every rank to another
    even_s: float  # per step, of one block's experts if all ranks have loads in proportion to their speeds
    sum_s: float  # per step, to sum the gradients over the replicas of one expert


def migration_costs(config: Config, cluster: Cluster, expert_bytes: float) -> MigrationCosts:
    """Predict the costs for a config whose mesh has no open sizes.

    `expert_bytes` is the size of an expert on one device, moments and average included. With a capacity, experts
    compute padding where they have fewer rows, so the least loaded rank takes as long as the busiest, and imbalance
    costs nothing (`even_s` is 0). Exchanges send buffers of a fixed size in any case. The fastest ranks are devices of
    the cluster.
    """
    speed_P = config.rank_speeds or (1.0,)  # their mean is 1
    alike = dataclasses.replace(config, migration=dataclasses.replace(config.migration, rank_speeds=None))
    step = Step(alike, cluster)
    send_s = step.collectives.send(expert_bytes, step.experts)
    has_average = config.optimizer.ema_decay is not None
    moved_arrays = 1 + config.optimizer.facts.expert_moments + has_average  # of a gradient's size
    sent_bytes = 2 * (1 - 1 / step.experts.ranks) * expert_bytes / moved_arrays
    sum_s = step.collectives.ring(sent_bytes, step.experts, "all_reduce")
    if config.model.moe.capacity_factor is not None:
        return MigrationCosts(send_s, 0.0, sum_s)
    experts = step.compute()["expert"]
    passes_s = experts.of("F", 1) + experts.of("B", 1) + experts.of("W", 1)
    return MigrationCosts(send_s, config.train.grad_accumulation * passes_s * max(speed_P), sum_s)


def load_ratio(load_E: Sequence[float], expert_S: Sequence[int], ranks: Ranks) -> float:
    """Return the load of the busiest rank divided by the mean load of ranks, or 1 without any load.

    The load of a rank counts divided by its speed.
    """
    return ExpertPlacement.of(load_E, expert_S, ranks).ratio


def num_copied(expert_S: Sequence[int], experts: int) -> int:
    """Count the experts that have more than one copy."""
    count = Counter(expert_S)
    return sum(count[expert] > 1 for expert in range(experts))


def is_due(load_E: Sequence[float], expert_S: Sequence[int], ranks: Ranks, threshold: float) -> bool:
    """Whether ranks are loaded too unevenly for `threshold`, or would be even enough without copies of experts."""
    alone_S = without_copies(expert_S, len(load_E))
    needless = alone_S != tuple(expert_S) and load_ratio(load_E, alone_S, ranks) < threshold
    return needless or load_ratio(load_E, expert_S, ranks) >= threshold


class Prices(NamedTuple):
    """Predicted costs of moves and of imbalance, in seconds unless said otherwise."""

    swap_s: float  # for one swap, in which both ranks send an expert; a copy takes half as long
    even_s: float  # per step, for one block's experts if ranks have even loads; 0 if padding makes all ranks equal
    steps: int  # steps within which a move must pay for itself
    sum_s: float = 0.0  # per step, to sum the gradients of an expert that has copies


class RebalancePlan(NamedTuple):
    """The moves of one block that pay best or, if they do not pay, that were refused."""

    moves: tuple[Move, ...]
    expert_S: tuple[int, ...]  # afterwards
    ratio_before: float
    ratio_after: float
    cost_s: float
    saved_s: float  # per step
    pays: bool


def num_swaps(found: RebalancePlan) -> int:
    """Count the swaps of two experts in a plan."""
    return sum(not move.copies for move in found.moves)


def plan(
    load_E: Sequence[float], expert_S: Sequence[int], ranks: Ranks, prices: Prices | None, threshold: float = 1.0
) -> RebalancePlan:
    """Plan the moves of one block: as many changes of the hill climbing as pay best, and whether these pay at all.

    Without prices, moves are free, and all changes that help are made. Present copies that are not chosen again are
    dropped.
    """
    experts, before = len(load_E), load_ratio(load_E, expert_S, ranks)
    num_ranks = ranks if isinstance(ranks, int) else len(ranks)
    nothing = RebalancePlan((), tuple(expert_S), before, before, 0.0, 0.0, pays=False)
    climbed = [*hill_climb_placement(load_E, expert_S, ranks, threshold)]
    if prices is None:
        moves, slots = moves_between(expert_S, climbed[-1] if climbed else expert_S, num_ranks, experts)
        after = load_ratio(load_E, slots, ranks)
        return RebalancePlan(moves, slots, before, after, 0.0, 0.0, pays=True) if slots != tuple(expert_S) else nothing
    copied, best, best_gain = num_copied(expert_S, experts), nothing, -float("inf")

    def saved_s(slots: Sequence[int]) -> float:
        better = before - load_ratio(load_E, slots, ranks)
        return better * prices.even_s - (num_copied(slots, experts) - copied) * prices.sum_s

    # finding moves takes longest, so begin where they can gain most: at best, half a swap brings one expert to a rank
    upper_bound = {
        slots: saved_s(slots) * prices.steps - _num_new(expert_S, slots, num_ranks, experts) / 2 * prices.swap_s
        for slots in climbed
    }
    for wanted in sorted(upper_bound, key=lambda slots: -upper_bound[slots]):
        if upper_bound[wanted] <= best_gain:
            break
        moves, slots = moves_between(expert_S, wanted, num_ranks, experts)
        saved, cost_s = saved_s(slots), sum(0.5 if move.copies else 1.0 for move in moves) * prices.swap_s
        gain = saved * prices.steps - cost_s
        if gain > best_gain:
            after = load_ratio(load_E, slots, ranks)
            best, best_gain = RebalancePlan(moves, slots, before, after, cost_s, saved, pays=gain > 0), gain
    return best


def _num_new(old_S: Sequence[int], new_S: Sequence[int], ranks: int, experts: int) -> int:
    """Count the experts that are new on their rank, over all ranks."""
    per_rank = len(old_S) // ranks
    parts = [slice(rank * per_rank, (rank + 1) * per_rank) for rank in range(ranks)]
    return sum(len({*new_S[part]} - {*old_S[part]} - {experts}) for part in parts)
