"""Which moves lead from one placement of experts to another, and in which trips they are made.

`expert_S` is the expert in each slot, E in a free one: rank r holds slots r·L to (r+1)·L - 1. E experts, S ≥ E slots,
P ranks, L = S/P slots of each. A rank has no two copies of an expert.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """Two slots, of different ranks, whose experts change places; or the second one gets a copy of the first's."""

    first: int
    second: int
    copies: bool = False


def moves_between(
    old_S: Sequence[int], new_S: Sequence[int], ranks: int, experts: int
) -> tuple[tuple[Move, ...], tuple[int, ...]]:
    """Few moves after which every rank has the experts of its new slots, to be made in order; and all slots then.

    Two experts that go each other's way take one move, a circle of n ranks n - 1. Slots of a rank are as good as each
    other, so experts keep theirs if their rank does. What a rank is not to have any more is left there, in a free slot.
    """
    held, slots, moves = len(old_S) // ranks, list(old_S), list[Move]()
    goal_P = [{*new_S[rank * held : (rank + 1) * held]} - {experts} for rank in range(ranks)]
    while (move := _next_move(slots, goal_P, held)) is not None:
        moves.append(move)
        one, two, copies = move
        slots[one], slots[two] = slots[one if copies else two], slots[one]
    kept = (expert if expert in goal_P[slot // held] else experts for slot, expert in enumerate(slots))
    return tuple(moves), tuple(kept)


def _next_move(slots: Sequence[int], goal_P: Sequence[set[int]], held: int) -> Move | None:
    """One that brings two experts where they are to be; or else copies one to where nobody misses what was there; or
    else, in a circle, brings one there."""
    missing_P = [goal - {*slots[rank * held : (rank + 1) * held]} for rank, goal in enumerate(goal_P)]
    stray = [slot for slot, expert in enumerate(slots) if expert not in goal_P[slot // held]]
    missing: dict[int, list[int]] = {}  # where each expert is to be and is not: stray slots of such ranks
    for slot in stray:
        for expert in missing_P[slot // held]:
            missing.setdefault(expert, []).append(slot)
    pairs = [(one, two) for one in stray for two in missing.get(slots[one], ())]
    for one, two in pairs:
        if slots[two] in missing_P[one // held]:
            return Move(one, two)
    count = Counter(slots)
    for two in stray:
        if missing_P[two // held] and (count[slots[two]] > 1 or slots[two] not in missing):
            return Move(slots.index(min(missing_P[two // held])), two, copies=True)
    return Move(*pairs[0]) if pairs else None


class SlotSwap(NamedTuple):
    """A move of a trip: `first` sends up, `second` down, of all ranks' slots; `row` is the pipeline stage's own."""

    stage: int
    row: int
    first: int
    second: int
    first_gets: bool  # or keeps what it sends
    second_gets: bool


class Trip(NamedTuple):
    """Moves that are made at once, of ranks that lie `shift` apart: the second slot's rank is so many further up."""

    shift: int
    moves: tuple[SlotSwap, ...]

    def sent_experts(self, ranks: int) -> int:
        """By every rank: what some rank has no expert for is sent as well. Half way around, up and down are one."""
        return 1 if 2 * self.shift == ranks else 2


def trips_of(moves: Sequence[tuple[int, int, Move]], held: int, ranks: int) -> tuple[Trip, ...]:
    """Moves (stage, row, slots), each in the first trip that is behind all earlier ones of its slots.

    In a trip each rank of a stage sends at most one expert up and one down.
    """
    shifts: list[int] = []
    trips: list[list[SlotSwap]] = []
    busy: list[set[tuple[int, int, str]]] = []
    behind: dict[tuple[int, int, int], int] = {}  # the trips before which a slot may not be touched again
    for stage, row, (first, second, copies) in moves:
        gets = not copies, True
        shift = (second // held - first // held) % ranks
        if 2 * shift > ranks:
            first, second, shift, gets = second, first, ranks - shift, gets[::-1]
        way = "up" if 2 * shift == ranks else "down"
        needs = {(stage, first // held, "up"), (stage, second // held, way)}
        slots = [(stage, row, slot) for slot in (first, second)]
        number = max(behind.get(slot, 0) for slot in slots)
        while number < len(trips) and (shifts[number] != shift or busy[number] & needs):
            number += 1
        if number == len(trips):
            shifts.append(shift)
            trips.append([])
            busy.append(set())
        trips[number].append(SlotSwap(stage, row, first, second, *gets))
        busy[number] |= needs
        behind.update(dict.fromkeys(slots, number + 1))
    return tuple(Trip(shift, tuple(made)) for shift, made in zip(shifts, trips, strict=True))
