"""Which ranges of a forward pass to cut into how many parts: dynamic programming (Lancet, section 5.1).

T(n) = min over i of T(i) + min over κ of P(i, n, κ): P is the time of groups i to n in κ parts, one part's exchanges
beside another part's compute.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from moe_jax.schedule.actions import Action, two_streams
from moe_jax.schedule.simulation import simulate_streams


class OpRange(NamedTuple):
    """Groups [first, stop), which run in so many parts."""

    first: int
    stop: int
    parts: int


class Partition(NamedTuple):
    """All groups in ranges, one behind another."""

    seconds: float
    ranges: tuple[OpRange, ...]


class RangePart(NamedTuple):
    """One part of a group: an exchange, or compute."""

    exchange: bool
    seconds: float


def fastest_partition(
    groups: int, longest: int, most_parts: int, seconds: Callable[[int, int, int], float]
) -> Partition:
    """The best of all partitions into ranges of at most `longest` groups; of equals the one with less cut.

    `seconds(first, stop, parts)` is infinite where a range may not be cut. What is not cut is a range of one group.
    """
    best = [Partition(0.0, ())]
    for stop in range(1, groups + 1):
        shortest = [OpRange(stop - 1, stop, 1)]
        cut = (
            OpRange(first, stop, parts)
            for first in range(max(stop - longest, 0), stop)
            for parts in range(2, most_parts + 1)
        )
        options = (
            Partition(best[each.first].seconds + seconds(*each), (*best[each.first].ranges, each))
            for each in (*shortest, *cut)
        )
        best.append(min(options, key=lambda option: option.seconds))
    return best[groups]


@lru_cache(maxsize=4096)
def pipeline_seconds(groups: tuple[RangePart, ...], parts: int) -> float:
    """Of so many equal parts of groups that follow each other: compute of all parts, then the next compute of all."""
    stages = [(kind, sum(each.seconds for each in run)) for kind, run in groupby(groups, lambda each: each.exchange)]
    tasks = [
        [Action("F", "dispatch" if exchange else "expert", stage, part) for part in range(parts)]
        for stage, (exchange, _) in enumerate(stages)
    ]
    needs = {task: frozenset[Action]() for task in tasks[0]}
    needs |= {task: frozenset({before}) for pair in pairwise(tasks) for before, task in zip(*pair, strict=True)}
    spans = simulate_streams(chain(*tasks), needs, lambda task: stages[task.block][1], two_streams)
    return max(span.end_s for span in spans.values())
