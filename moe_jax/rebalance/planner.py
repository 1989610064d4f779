"""Which experts change places, or get copies, so that ranks are loaded alike, and whether that pays.

`expert_S` is the expert in each slot, E in a free one, as in `rebalance/hill_climb.py`. E experts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.rebalance.hill_climb import Placed, hill_climb_placement, without_copies
from moe_jax.rebalance.moves import Move, moves_between


def load_ratio(load_E: Sequence[float], expert_S: Sequence[int], ranks: int) -> float:
    """Load of the busiest rank / mean of all: what a step waits for. 1 without any load."""
    return Placed.of(load_E, expert_S, ranks).ratio


def num_copied(expert_S: Sequence[int], experts: int) -> int:
    """How many experts have copies."""
    count = Counter(expert_S)
    return sum(count[expert] > 1 for expert in range(experts))


def is_due(load_E: Sequence[float], expert_S: Sequence[int], ranks: int, threshold: float) -> bool:
    """Whether ranks are loaded too unevenly, or would not be without the copies that there are."""
    alone_S = without_copies(expert_S, len(load_E))
    needless = alone_S != tuple(expert_S) and load_ratio(load_E, alone_S, ranks) < threshold
    return needless or load_ratio(load_E, expert_S, ranks) >= threshold


class Prices(NamedTuple):
    """What a move costs, and what imbalance does."""

    swap_s: float  # of one swap: both ranks send an expert; a copy takes half as long
    even_s: float  # per step, of one block's experts where all ranks are loaded alike; 0 if padding hides who is busy
    steps: int  # in which a move has to pay back
    sum_s: float = 0.0  # per step, of the gradients of an expert that has copies


class RebalancePlan(NamedTuple):
    """Of one block: the moves that pay best, or those that were refused."""

    moves: tuple[Move, ...]
    expert_S: tuple[int, ...]  # afterwards
    ratio_before: float
    ratio_after: float
    cost_s: float
    saved_s: float  # per step
    pays: bool


def num_swaps(found: RebalancePlan) -> int:
    """Pairs of experts that change places in a plan."""
    return sum(not move.copies for move in found.moves)


def plan(
    load_E: Sequence[float], expert_S: Sequence[int], ranks: int, prices: Prices | None, threshold: float = 1.0
) -> RebalancePlan:
    """As many changes of the climb as pay best, and whether they do at all; without prices all that help, for nothing.

    Copies that were there and are not chosen again are given up.
    """
    experts, before = len(load_E), load_ratio(load_E, expert_S, ranks)
    nothing = RebalancePlan((), tuple(expert_S), before, before, 0.0, 0.0, pays=False)
    climbed = [*hill_climb_placement(load_E, expert_S, ranks, threshold)]
    if prices is None:
        moves, slots = moves_between(expert_S, climbed[-1] if climbed else expert_S, ranks, experts)
        after = load_ratio(load_E, slots, ranks)
        return RebalancePlan(moves, slots, before, after, 0.0, 0.0, pays=True) if slots != tuple(expert_S) else nothing
    copied, best, best_gain = num_copied(expert_S, experts), nothing, -float("inf")

    def saved_s(slots: Sequence[int]) -> float:
        better = before - load_ratio(load_E, slots, ranks)
        return better * prices.even_s - (num_copied(slots, experts) - copied) * prices.sum_s

    # moves take longest to find, so first where they can pay most: half a swap brings one expert to a rank
    most = {
        slots: saved_s(slots) * prices.steps - _num_new(expert_S, slots, ranks, experts) / 2 * prices.swap_s
        for slots in climbed
    }
    for wanted in sorted(most, key=lambda slots: -most[slots]):
        if most[wanted] <= best_gain:
            break
        moves, slots = moves_between(expert_S, wanted, ranks, experts)
        saved, cost_s = saved_s(slots), sum(0.5 if move.copies else 1.0 for move in moves) * prices.swap_s
        gain = saved * prices.steps - cost_s
        if gain > best_gain:
            after = load_ratio(load_E, slots, ranks)
            best, best_gain = RebalancePlan(moves, slots, before, after, cost_s, saved, pays=gain > 0), gain
    return best


def _num_new(old_S: Sequence[int], new_S: Sequence[int], ranks: int, experts: int) -> int:
    """How many experts ranks have that they had not."""
    held = len(old_S) // ranks
    parts = [slice(rank * held, (rank + 1) * held) for rank in range(ranks)]
    return sum(len({*new_S[part]} - {*old_S[part]} - {experts}) for part in parts)
