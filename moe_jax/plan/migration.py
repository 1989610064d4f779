"""Which experts change places, or get copies, so that ranks are loaded alike, and whether that pays.

`expert_S` is the expert in each slot, E in a free one, as in `plan/climb.py`. E experts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.plan.climb import Placed, climb, without_copies
from moe_jax.plan.moves import Move, moves_between


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


class Plan(NamedTuple):
    """Of one block: the moves that pay best, or those that were refused."""

    moves: tuple[Move, ...]
    expert_S: tuple[int, ...]  # afterwards
    ratio_before: float
    ratio_after: float
    cost_s: float
    saved_s: float  # per step
    pays: bool


def num_swaps(found: Plan) -> int:
    """Pairs of experts that change places in a plan."""
    return sum(not move.copies for move in found.moves)


def plan(
    load_E: Sequence[float], expert_S: Sequence[int], ranks: int, prices: Prices | None, threshold: float = 1.0
) -> Plan:
    """As many changes of the climb as pay best, and whether they do at all; without prices all that help, for nothing.

    Copies that were there and are not chosen again are given up.
    """
    experts, before = len(load_E), load_ratio(load_E, expert_S, ranks)
    nothing = Plan((), tuple(expert_S), before, before, 0.0, 0.0, pays=False)
    best, best_gain = nothing, -float("inf")
    for climbed in climb(load_E, expert_S, ranks, threshold):
        moves, slots = moves_between(expert_S, climbed, ranks, experts)
        after = load_ratio(load_E, slots, ranks)
        if prices is None:
            best = nothing if slots == tuple(expert_S) else Plan(moves, slots, before, after, 0.0, 0.0, pays=True)
            continue
        more_copied = num_copied(slots, experts) - num_copied(expert_S, experts)
        saved_s = (before - after) * prices.even_s - more_copied * prices.sum_s
        cost_s = sum(0.5 if move.copies else 1.0 for move in moves) * prices.swap_s
        gain = saved_s * prices.steps - cost_s
        if gain > best_gain:
            best, best_gain = Plan(moves, slots, before, after, cost_s, saved_s, pays=gain > 0), gain
    return best
