"""How many experts each rank holds where ranks have different speeds and loads are not known yet."""

import heapq
from collections.abc import Sequence


def expert_counts(experts: int, speed_P: Sequence[float], most: int) -> tuple[int, ...]:
    """Return the number of experts of each rank, at most `most`, with which equally loaded ones are computed soonest.

    The largest count / speed is as small as possible: each expert goes to the rank that has then finished first.
    """
    counts = [0] * len(speed_P)
    finished = [(1 / speed, rank) for rank, speed in enumerate(speed_P)]
    heapq.heapify(finished)
    for _ in range(experts):
        _, rank = heapq.heappop(finished)
        counts[rank] += 1
        if counts[rank] < most:
            heapq.heappush(finished, ((counts[rank] + 1) / speed_P[rank], rank))
    return tuple(counts)
