"""Hill climbing: move and replicate experts until ranks have similar loads (Piper, section VI, algorithm 2).

`expert_S` is the expert at each position, or E at a free position; rank r has positions r·L to (r+1)·L - 1. Shape
suffixes: E experts, S ≥ E positions, P ranks; L = S/P positions per rank. Replicas ("copies") of an expert are on
different ranks and share its load equally.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MAX_CHANGES = 100
_GAIN = 1 - 1e-9  # a load must fall below this fraction of another to count as lower; the rest is rounding


@dataclass(frozen=True)
class ExpertPlacement:
    """A placement of experts at positions, and the loads of experts, positions and ranks."""

    load_E: Sequence[float]
    expert_S: tuple[int, ...]
    load_S: tuple[float, ...]
    load_P: tuple[float, ...]

    @classmethod
    def of(cls, load_E: Sequence[float], expert_S: Sequence[int], ranks: int) -> "ExpertPlacement":
        """Compute the loads of positions and ranks from those of experts."""
        count, per_rank = Counter(expert_S), len(expert_S) // ranks
        load_S = tuple(load_E[expert] / count[expert] if expert < len(load_E) else 0.0 for expert in expert_S)
        load_P = tuple(sum(load_S[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks))
        return cls(load_E, tuple(expert_S), load_S, load_P)

    @property
    def no_expert(self) -> int:
        """The number in `expert_S` of a free position."""
        return len(self.load_E)

    @property
    def ratio(self) -> float:
        """Load of the busiest rank, for which a step waits, divided by the mean of all ranks. 1 without any load."""
        return max(self.load_P) * len(self.load_P) / sum(self.load_P) if any(self.load_P) else 1.0

    def by_load(self) -> list[int]:
        """List the ranks, from the least to the most loaded one."""
        return sorted(range(len(self.load_P)), key=lambda rank: self.load_P[rank])

    def slots_of(self, rank: int) -> range:
        """Return the positions of a rank."""
        per_rank = len(self.expert_S) // len(self.load_P)
        return range(rank * per_rank, (rank + 1) * per_rank)

    def experts_of(self, rank: int) -> set[int]:
        """Return the experts of a rank."""
        return {self.expert_S[slot] for slot in self.slots_of(rank)} - {self.no_expert}

    def replace(self, new: dict[int, int]) -> "ExpertPlacement":
        """Return the placement with other experts at some positions; `new` maps positions to experts."""
        expert_S = [new.get(slot, expert) for slot, expert in enumerate(self.expert_S)]
        return ExpertPlacement.of(self.load_E, expert_S, len(self.load_P))


def without_copies(expert_S: Sequence[int], experts: int) -> tuple[int, ...]:
    """Return the positions with only the first copy of each expert; `experts` is E, which marks a free position."""
    first = {expert: slot for slot, expert in reversed([*enumerate(expert_S)])}
    return tuple(expert if first[expert] == slot else experts for slot, expert in enumerate(expert_S))


def hill_climb_placement(
    load_E: Sequence[float], expert_S: Sequence[int], ranks: int, threshold: float = 1.0
) -> Iterator[tuple[int, ...]]:
    """Yield `expert_S` after removing copies (if there are any), after one change, two, and so on, until none helps.

    A change is a swap between the most and the least loaded rank, or a copy of the former's most loaded expert to a
    free position of the latter. If that does not help, the least loaded rank is replaced by the next more loaded one,
    and so on, which algorithm 2 does not do. Copies are made while the load of the busiest rank is at least `threshold`
    times the mean: first, if no swaps can change that, or else after the last swap that helps.
    """
    placed = ExpertPlacement.of(load_E, without_copies(expert_S, len(load_E)), ranks)
    if placed.expert_S != tuple(expert_S):
        yield placed.expert_S
    mean = sum(load_E) / ranks
    for _ in range(_MAX_CHANGES if mean else 0):
        changes = [_best_swap, _best_copy] if placed.ratio >= threshold else [_best_swap]
        if _lower_bound_with_hottest(placed) > threshold * mean:
            changes.reverse()
        found = next(filter(None, (change(placed) for change in changes)), None)
        if found is None:
            return
        placed = found
        yield placed.expert_S


def _lower_bound_with_hottest(placed: ExpertPlacement) -> float:
    """Bound from below the mean load, after any swaps, of the ranks that have the most loaded expert.

    It is reached if all their other experts are the least loaded ones.
    """
    expert = placed.expert_S[placed.load_S.index(max(placed.load_S))]
    ranks = [experts for rank in range(len(placed.load_P)) if expert in (experts := placed.experts_of(rank))]
    others = sum(map(len, ranks)) - len(ranks)
    load_S = zip(placed.expert_S, placed.load_S, strict=True)
    least = sorted(load for each, load in load_S if each not in (expert, placed.no_expert))[:others]
    return (placed.load_E[expert] + sum(least)) / len(ranks)


def _best_swap(placed: ExpertPlacement) -> ExpertPlacement | None:
    """Return the placement after the best swap of the busiest rank; None if no swap helps."""
    *others, busiest = placed.by_load()
    for other in others:
        pair = _best_pair(placed, busiest, other)
        if pair is not None:
            one, two = pair
            return placed.replace({one: placed.expert_S[two], two: placed.expert_S[one]})
    return None


def _best_pair(placed: ExpertPlacement, busiest: int, other: int) -> tuple[int, int] | None:
    """Find the two positions for which a swap makes the loads of two ranks most similar; None if no swap helps."""
    gap = placed.load_P[busiest] - placed.load_P[other]
    best, found = gap * _GAIN, None
    here, there = placed.experts_of(busiest), placed.experts_of(other)
    movable_here = [slot for slot in placed.slots_of(busiest) if placed.expert_S[slot] in here - there]
    movable_there = [slot for slot in placed.slots_of(other) if placed.expert_S[slot] in there - here]
    for one in movable_here:
        for two in movable_there:
            left = abs(gap - 2 * (placed.load_S[one] - placed.load_S[two]))
            if left < best:
                best, found = left, (one, two)
    return found


def _best_copy(placed: ExpertPlacement) -> ExpertPlacement | None:
    """Return the placement with one more copy of an expert of the busiest rank; None if no copy helps or fits."""
    *others, busiest = placed.by_load()
    by_share = sorted(placed.experts_of(busiest), key=lambda each: -placed.load_E[each] / placed.expert_S.count(each))
    for expert in by_share:
        share = placed.load_E[expert] / (placed.expert_S.count(expert) + 1)
        for other in others:
            free = next((slot for slot in placed.slots_of(other) if placed.expert_S[slot] == placed.no_expert), None)
            helps = share > 0 and placed.load_P[other] + share < placed.load_P[busiest] * _GAIN
            if free is not None and helps and expert not in placed.experts_of(other):
                return placed.replace({free: expert})
    return None
