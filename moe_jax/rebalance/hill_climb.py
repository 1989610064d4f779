"""Hill climbing: experts change ranks, or get copies, until ranks are loaded alike (Piper, section VI, algorithm 2).

`expert_S` is the expert in each slot, E in a free one: rank r holds slots r·L to (r+1)·L - 1. E experts, S ≥ E slots,
P ranks, L = S/P slots of each. Copies of an expert lie on different ranks and share its load.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST_CHANGES = 100
_GAIN = 1 - 1e-9  # of a load: less is rounding


@dataclass(frozen=True)
class Placed:
    """Experts in slots, and what slots and ranks are loaded with."""

    load_E: Sequence[float]
    expert_S: tuple[int, ...]
    load_S: tuple[float, ...]
    load_P: tuple[float, ...]

    @classmethod
    def of(cls, load_E: Sequence[float], expert_S: Sequence[int], ranks: int) -> "Placed":
        """Of as many ranks."""
        count, held = Counter(expert_S), len(expert_S) // ranks
        load_S = tuple(load_E[expert] / count[expert] if expert < len(load_E) else 0.0 for expert in expert_S)
        load_P = tuple(sum(load_S[rank * held : (rank + 1) * held]) for rank in range(ranks))
        return cls(load_E, tuple(expert_S), load_S, load_P)

    @property
    def free(self) -> int:
        """What stands for no expert."""
        return len(self.load_E)

    @property
    def ratio(self) -> float:
        """Load of the busiest rank / mean of all: what a step waits for. 1 without any load."""
        return max(self.load_P) * len(self.load_P) / sum(self.load_P) if any(self.load_P) else 1.0

    def by_load(self) -> list[int]:
        """Ranks, the least loaded one first."""
        return sorted(range(len(self.load_P)), key=lambda rank: self.load_P[rank])

    def own(self, rank: int) -> range:
        """The slots of a rank."""
        held = len(self.expert_S) // len(self.load_P)
        return range(rank * held, (rank + 1) * held)

    def experts(self, rank: int) -> set[int]:
        """Of a rank."""
        return {self.expert_S[slot] for slot in self.own(rank)} - {self.free}

    def put(self, new: dict[int, int]) -> "Placed":
        """With other experts in some slots."""
        expert_S = [new.get(slot, expert) for slot, expert in enumerate(self.expert_S)]
        return Placed.of(self.load_E, expert_S, len(self.load_P))


def without_copies(expert_S: Sequence[int], experts: int) -> tuple[int, ...]:
    """The first copy of each expert stays."""
    first = {expert: slot for slot, expert in reversed([*enumerate(expert_S)])}
    return tuple(expert if first[expert] == slot else experts for slot, expert in enumerate(expert_S))


def hill_climb_placement(
    load_E: Sequence[float], expert_S: Sequence[int], ranks: int, threshold: float = 1.0
) -> Iterator[tuple[int, ...]]:
    """Slots without copies, if there are some, and after one change, two, and so on, until none helps.

    A change is a swap between the most and the least loaded rank, or a copy of the former's most loaded expert in a
    free slot of the latter. Where it helps nothing, ranks that are loaded more are tried instead of the least loaded
    one, which algorithm 2 does not. Copies are made while the busiest rank is `threshold` times as loaded as the mean:
    first, if no swaps can change that, or behind the last swap that helps.
    """
    placed = Placed.of(load_E, without_copies(expert_S, len(load_E)), ranks)
    if placed.expert_S != tuple(expert_S):
        yield placed.expert_S
    mean = sum(load_E) / ranks
    for _ in range(_MOST_CHANGES if mean else 0):
        ways = [_swapped, _copied] if placed.ratio >= threshold else [_swapped]
        if _least_with_hottest(placed) > threshold * mean:
            ways.reverse()
        found = next(filter(None, (way(placed) for way in ways)), None)
        if found is None:
            return
        placed = found
        yield placed.expert_S


def _least_with_hottest(placed: Placed) -> float:
    """What ranks with the most loaded expert have on average at least, if they swap all others for the least loaded."""
    expert = placed.expert_S[placed.load_S.index(max(placed.load_S))]
    having = [placed.experts(rank) for rank in range(len(placed.load_P)) if expert in placed.experts(rank)]
    others = sum(map(len, having)) - len(having)
    load_S = zip(placed.expert_S, placed.load_S, strict=True)
    least = sorted(load for each, load in load_S if each not in (expert, placed.free))[:others]
    return (placed.load_E[expert] + sum(least)) / len(having)


def _swapped(placed: Placed) -> Placed | None:
    """With the best swap of the busiest rank; None: none helps."""
    *others, busiest = placed.by_load()
    for other in others:
        pair = _best_pair(placed, busiest, other)
        if pair is not None:
            one, two = pair
            return placed.put({one: placed.expert_S[two], two: placed.expert_S[one]})
    return None


def _best_pair(placed: Placed, busiest: int, other: int) -> tuple[int, int] | None:
    """The slots whose swap leaves two ranks closest to each other; None: no swap helps."""
    apart = placed.load_P[busiest] - placed.load_P[other]
    best, found = apart * _GAIN, None
    here, there = placed.experts(busiest), placed.experts(other)
    ours = [slot for slot in placed.own(busiest) if placed.expert_S[slot] in here - there]
    theirs = [slot for slot in placed.own(other) if placed.expert_S[slot] in there - here]
    for one in ours:
        for two in theirs:
            left = abs(apart - 2 * (placed.load_S[one] - placed.load_S[two]))
            if left < best:
                best, found = left, (one, two)
    return found


def _copied(placed: Placed) -> Placed | None:
    """With one copy more of an expert of the busiest rank; None: none helps, or no slot is free."""
    *others, busiest = placed.by_load()
    for expert in sorted(placed.experts(busiest), key=lambda each: -placed.load_E[each] / placed.expert_S.count(each)):
        share = placed.load_E[expert] / (placed.expert_S.count(expert) + 1)
        for other in others:
            free = next((slot for slot in placed.own(other) if placed.expert_S[slot] == placed.free), None)
            helps = share > 0 and placed.load_P[other] + share < placed.load_P[busiest] * _GAIN
            if free is not None and helps and expert not in placed.experts(other):
                return placed.put({free: expert})
    return None
