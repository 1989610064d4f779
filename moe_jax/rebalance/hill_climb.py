"""Hill climbing: move and replicate experts until ranks have similar loads (Piper, section VI, algorithm 2).

`expert_S` is the expert at each position, or E at a free position; rank r has positions r·L to (r+1)·L - 1. Shape
suffixes: E experts, S ≥ E positions, P ranks; L = S/P positions per rank. Replicas ("copies") of an expert are on
different ranks and share its load equally or, if ranks have different speeds, in proportion to these. A rank is busy
for its load divided by its speed.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MAX_CHANGES = 100
_GAIN = 1 - 1e-9  # a load must fall below this fraction of another to count as lower; the rest is rounding


@dataclass(frozen=True)
class ExpertPlacement:
    """A placement of experts at positions, the loads of experts and positions, and how long ranks are busy."""

    load_E: Sequence[float]
    expert_S: tuple[int, ...]
    speed_P: tuple[float, ...]  # relative to their mean
    load_S: tuple[float, ...]
    busy_P: tuple[float, ...]  # load of a rank divided by its speed

    @classmethod
    def of(cls, load_E: Sequence[float], expert_S: Sequence[int], ranks: int | Sequence[float]) -> "ExpertPlacement":
        """Compute the loads of positions and ranks from those of experts.

        `ranks`: the number of ranks, or their speeds relative to their mean.
        """
        speed_P = (1.0,) * ranks if isinstance(ranks, int) else tuple(ranks)
        per_rank, total_of = len(expert_S) // len(speed_P), defaultdict[int, float](float)
        for slot, expert in enumerate(expert_S):
            total_of[expert] += speed_P[slot // per_rank]
        load_S = tuple(
            load_E[expert] * speed_P[slot // per_rank] / total_of[expert] if expert < len(load_E) else 0.0
            for slot, expert in enumerate(expert_S)
        )
        busy_P = tuple(
            sum(load_S[rank * per_rank : (rank + 1) * per_rank]) / speed for rank, speed in enumerate(speed_P)
        )
        return cls(load_E, tuple(expert_S), speed_P, load_S, busy_P)

    @property
    def no_expert(self) -> int:
        """The number in `expert_S` of a free position."""
        return len(self.load_E)

    @property
    def ratio(self) -> float:
        """How long the busiest rank takes, for which a step waits, in relation to ranks that all finish at once.

        With equal speeds that is its load divided by the mean load of ranks. 1 without any load.
        """
        total = sum(map(operator.mul, self.busy_P, self.speed_P))
        return max(self.busy_P) * len(self.busy_P) / total if total else 1.0

    @property
    def is_uneven(self) -> bool:
        """Whether ranks have different speeds."""
        return len(set(self.speed_P)) > 1

    def by_load(self) -> list[int]:
        """List the ranks, from the least busy to the busiest one."""
        return sorted(range(len(self.busy_P)), key=lambda rank: self.busy_P[rank])

    def slots_of(self, rank: int) -> range:
        """Return the positions of a rank."""
        per_rank = len(self.expert_S) // len(self.speed_P)
        return range(rank * per_rank, (rank + 1) * per_rank)

    def experts_of(self, rank: int) -> set[int]:
        """Return the experts of a rank."""
        return {self.expert_S[slot] for slot in self.slots_of(rank)} - {self.no_expert}

    def replace(self, new: dict[int, int]) -> "ExpertPlacement":
        """Return the placement with other experts at some positions; `new` maps positions to experts."""
        expert_S = [new.get(slot, expert) for slot, expert in enumerate(self.expert_S)]
        return ExpertPlacement.of(self.load_E, expert_S, self.speed_P)


def without_copies(expert_S: Sequence[int], experts: int) -> tuple[int, ...]:
    """Return the positions with only the first copy of each expert; `experts` is E, which marks a free position."""
    first = {expert: slot for slot, expert in reversed([*enumerate(expert_S)])}
    return tuple(expert if first[expert] == slot else experts for slot, expert in enumerate(expert_S))


def hill_climb_placement(
    load_E: Sequence[float], expert_S: Sequence[int], ranks: int | Sequence[float], threshold: float = 1.0
) -> Iterator[tuple[int, ...]]:
    """Yield `expert_S` after removing copies (if there are any), after one change, two, and so on, until none helps.

    A change is a swap between the busiest and the least busy rank, or a copy of the former's most loaded expert to a
    free position of the latter. If that does not help, the least busy rank is replaced by the next busier one,
    and so on, which algorithm 2 does not do. If ranks have different speeds, an expert may also change places with a
    free position, so that slow ranks hold fewer. Copies are made while the load of the busiest rank is at least
    `threshold` times the mean: first, if no swaps can change that, or else after the last swap that helps.
    """
    placed = ExpertPlacement.of(load_E, without_copies(expert_S, len(load_E)), ranks)
    if placed.expert_S != tuple(expert_S):
        yield placed.expert_S
    mean = sum(load_E) / len(placed.speed_P)
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
    """Bound from below how long, after any swaps, the ranks that have the most loaded expert are busy on average.

    It is reached if all their other experts are the least loaded ones; if ranks have different speeds, they may have
    no others.
    """
    expert = placed.expert_S[placed.load_S.index(max(placed.load_S))]
    ranks = [rank for rank in range(len(placed.speed_P)) if expert in placed.experts_of(rank)]
    others = 0 if placed.is_uneven else sum(len(placed.experts_of(rank)) - 1 for rank in ranks)
    load_S = zip(placed.expert_S, placed.load_S, strict=True)
    least = sorted(load for each, load in load_S if each not in (expert, placed.no_expert))[:others]
    return (placed.load_E[expert] + sum(least)) / sum(placed.speed_P[rank] for rank in ranks)


def _best_swap(placed: ExpertPlacement) -> ExpertPlacement | None:
    """Return the placement after the best swap of the busiest rank; None if no swap helps."""
    *others, busiest = placed.by_load()
    for other in others:
        pair = _best_pair(placed, busiest, other)
        if pair is not None:
            one, two = pair
            swapped = placed.replace({one: placed.expert_S[two], two: placed.expert_S[one]})
            if sorted(swapped.busy_P, reverse=True) < sorted(placed.busy_P, reverse=True):
                return swapped
    return None


def _best_pair(placed: ExpertPlacement, busiest: int, other: int) -> tuple[int, int] | None:
    """Find the two positions for which the busier one of two ranks is least busy after a swap; None if no swap helps.

    Pairs are compared as if a copy kept its share of an expert's load, whatever the speed of its new rank.
    """
    best, found = placed.busy_P[busiest] * _GAIN, None
    here, there = placed.experts_of(busiest), placed.experts_of(other)
    movable_here = [slot for slot in placed.slots_of(busiest) if placed.expert_S[slot] in here - there]
    movable_there = [slot for slot in placed.slots_of(other) if placed.expert_S[slot] in there - here]
    if placed.is_uneven:
        movable_there += [slot for slot in placed.slots_of(other) if placed.expert_S[slot] == placed.no_expert][:1]
    for one in movable_here:
        for two in movable_there:
            moved = placed.load_S[one] - placed.load_S[two]
            busier = max(
                placed.busy_P[busiest] - moved / placed.speed_P[busiest],
                placed.busy_P[other] + moved / placed.speed_P[other],
            )
            if busier < best:
                best, found = busier, (one, two)
    return found


def _best_copy(placed: ExpertPlacement) -> ExpertPlacement | None:
    """Return the placement with one more copy of an expert of the busiest rank; None if no copy helps or fits."""
    *others, busiest = placed.by_load()
    slots = [slot for slot in placed.slots_of(busiest) if placed.expert_S[slot] != placed.no_expert]
    for expert in (placed.expert_S[slot] for slot in sorted(slots, key=lambda slot: -placed.load_S[slot])):
        speed = sum(each for rank, each in enumerate(placed.speed_P) if expert in placed.experts_of(rank))
        for other in others:
            free = next((slot for slot in placed.slots_of(other) if placed.expert_S[slot] == placed.no_expert), None)
            more = placed.load_E[expert] / (speed + placed.speed_P[other])  # time of each rank that has a copy
            helps = more > 0 and placed.busy_P[other] + more < placed.busy_P[busiest] * _GAIN
            if free is not None and helps and expert not in placed.experts_of(other):
                return placed.replace({free: expert})
    return None
