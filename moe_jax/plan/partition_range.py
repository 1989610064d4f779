"""Which ranges of a forward pass to split into how many parts: dynamic programming (Lancet, section 5.1).

T(n) = min over i of T(i) + min over κ of P(i, n, κ), where T(n) is the best time of the first n groups and P the time
of groups i to n in κ parts, in which the exchanges of one part overlap with the compute of another.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from moe_jax.schedule.actions import Action, two_streams
from moe_jax.schedule.simulation import simulate_streams


class OpRange(NamedTuple):
    """The groups [first, stop), which run in `parts` parts."""

    first: int
    stop: int
    parts: int


class Partition(NamedTuple):
    """All groups in consecutive ranges."""

    seconds: float
    ranges: tuple[OpRange, ...]


class RangePart(NamedTuple):
    """One part of a group: an exchange, or compute."""

    exchange: bool
    seconds: float


def fastest_partition(
    groups: int, longest: int, most_parts: int, seconds: Callable[[int, int, int], float]
) -> Partition:
    """The fastest partition into ranges of at most `longest` groups; among equals the one with fewer parts.

    `seconds(first, stop, parts)` is infinite for a range that may not be split. Unsplit groups are ranges of one group.
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
    """Seconds of consecutive groups in `parts` equal parts: compute of all parts, then the next compute of all."""
    stages = [(kind, sum(each.seconds for each in run)) for kind, run in groupby(groups, lambda each: each.exchange)]
    tasks = [
        [Action("F", "dispatch" if exchange else "expert", stage, part) for part in range(parts)]
        for stage, (exchange, _) in enumerate(stages)
    ]
    needs = {task: frozenset[Action]() for task in tasks[0]}
    needs |= {task: frozenset({before}) for pair in pairwise(tasks) for before, task in zip(*pair, strict=True)}
    spans = simulate_streams(chain(*tasks), needs, lambda task: stages[task.block][1], two_streams)
    return max(span.end_s for span in spans.values())
