"""Which experts change places so that ranks are loaded alike (Piper, section VI, algorithm 2: hill climbing).

Experts lie in slots: rank r holds slots r·L to (r+1)·L - 1. E experts, P ranks, L = E/P slots of each.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST_SWAPS = 100


class Swap(NamedTuple):
    """Two slots, of different ranks, whose experts change places."""

    first: int
    second: int


def rank_loads(load_E: Sequence[float], slot_E: Sequence[int], ranks: int) -> list[float]:
    """What the experts of each rank are loaded with together."""
    held = len(load_E) // ranks
    load_P = [0.0] * ranks
    for load, slot in zip(load_E, slot_E, strict=True):
        load_P[slot // held] += load
    return load_P


def load_ratio(load_E: Sequence[float], slot_E: Sequence[int], ranks: int) -> float:
    """Load of the busiest rank / mean of all: what a step waits for. 1 without any load."""
    load_P = rank_loads(load_E, slot_E, ranks)
    return max(load_P) * ranks / sum(load_P) if any(load_P) else 1.0


def climb(load_E: Sequence[float], slot_E: Sequence[int], ranks: int) -> Iterator[tuple[int, ...]]:
    """Slots of the experts after one swap, two, and so on, until none helps.

    Each swap is the one between the most and the least loaded rank that brings their loads closest together. Where
    none does, ranks that are loaded more are tried instead of the least loaded one, which algorithm 2 does not.
    """
    held, slots = len(load_E) // ranks, list(slot_E)
    for _ in range(_MOST_SWAPS):
        load_P = rank_loads(load_E, slots, ranks)
        by_load = sorted(range(ranks), key=lambda rank: load_P[rank])
        experts_P = [[e for e, slot in enumerate(slots) if slot // held == rank] for rank in range(ranks)]
        busiest = by_load[-1]
        for other in by_load[:-1]:
            pair = _best_pair(load_E, experts_P[busiest], experts_P[other], load_P[busiest] - load_P[other])
            if pair is not None:
                break
        else:
            return
        one, two = pair
        slots[one], slots[two] = slots[two], slots[one]
        yield tuple(slots)


def _best_pair(
    load_E: Sequence[float], from_busy: Sequence[int], from_idle: Sequence[int], apart: float
) -> tuple[int, int] | None:
    """The experts whose swap leaves two ranks, whose loads are `apart`, closest to each other; None: no swap helps."""
    best, found = apart * (1 - 1e-9), None  # less than rounding is no gain
    for one in from_busy:
        for two in from_idle:
            left = abs(apart - 2 * (load_E[one] - load_E[two]))
            if left < best:
                best, found = left, (one, two)
    return found


def swaps_between(old_E: Sequence[int], new_E: Sequence[int], ranks: int) -> tuple[tuple[Swap, ...], tuple[int, ...]]:
    """Few swaps after which every expert is on the rank of its new slot, to be made in order; and where all are then.

    Two experts that go each other's way take one swap, a circle of n ranks n - 1. Slots of a rank are as good as each
    other, so experts keep theirs if their rank does.
    """
    held, slots, swaps = len(old_E) // ranks, list(old_E), list[Swap]()
    goal_E = [slot // held for slot in new_E]
    for direct in (True, False):
        while (pair := _misplaced(slots, goal_E, held, direct)) is not None:
            one, two = pair
            swaps.append(Swap(slots[one], slots[two]))
            slots[one], slots[two] = slots[two], slots[one]
    return tuple(swaps), tuple(slots)


def _misplaced(slots: Sequence[int], goal_E: Sequence[int], held: int, direct: bool) -> tuple[int, int] | None:
    """An expert, and one on the rank where it is to be; `direct`: that one has to go where the first one comes from."""
    for one, slot in enumerate(slots):
        if slot // held == goal_E[one]:
            continue
        for two, other in enumerate(slots):
            there = other // held == goal_E[one] != goal_E[two]
            if there and (not direct or goal_E[two] == slot // held):
                return one, two
    return None


class Trip(NamedTuple):
    """Swaps that are made at once, of ranks that lie `shift` apart.

    Of `up`, the expert in the first slot goes `shift` ranks up, and the one in the second slot as many down. Each is
    [stage, row, slot, slot]: of the pipeline stage's own rows of blocks, and of all ranks' slots.
    """

    shift: int
    up: tuple[tuple[int, int, int, int], ...]

    def sent_experts(self, ranks: int) -> int:
        """By every rank: what some rank has no expert for is sent as well. Half way around, up and down are one."""
        return 1 if 2 * self.shift == ranks else 2


def trips_of(swaps: Sequence[tuple[int, int, Swap]], held: int, ranks: int) -> tuple[Trip, ...]:
    """Swaps (stage, row, slots), each in the first trip that is behind all earlier ones of its slots.

    In a trip each rank of a stage sends at most one expert up and one down.
    """
    shifts: list[int] = []
    trips: list[list[tuple[int, int, int, int]]] = []
    busy: list[set[tuple[int, int, str]]] = []
    behind: dict[tuple[int, int, int], int] = {}  # the trips before which a slot may not be touched again
    for stage, row, (first, second) in swaps:
        shift = (second // held - first // held) % ranks
        if 2 * shift > ranks:
            first, second, shift = second, first, ranks - shift
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
        trips[number].append((stage, row, first, second))
        busy[number] |= needs
        behind.update(dict.fromkeys(slots, number + 1))
    return tuple(Trip(shift, tuple(up)) for shift, up in zip(shifts, trips, strict=True))


class Prices(NamedTuple):
    """What a move costs, and what imbalance does."""

    swap_s: float  # of one swap: both ranks send an expert
    even_s: float  # per step, of one block's experts where all ranks are loaded alike; 0 if padding hides who is busy
    steps: int  # in which a move has to pay back


class Plan(NamedTuple):
    """Of one block: the swaps that pay best, or those that were refused."""

    swaps: tuple[Swap, ...]
    slot_E: tuple[int, ...]  # afterwards
    ratio_before: float
    ratio_after: float
    cost_s: float
    saved_s: float  # per step
    pays: bool


def plan(load_E: Sequence[float], slot_E: Sequence[int], ranks: int, prices: Prices | None) -> Plan:
    """As many swaps of the climb as pay best, and whether they do at all; without prices all that help, for nothing."""
    before = load_ratio(load_E, slot_E, ranks)
    nothing = Plan((), tuple(slot_E), before, before, 0.0, 0.0, pays=False)
    best, best_gain = nothing, -float("inf")
    for climbed in climb(load_E, slot_E, ranks):
        swaps, slots = swaps_between(slot_E, climbed, ranks)
        after = load_ratio(load_E, slots, ranks)
        if prices is None:
            best = Plan(swaps, slots, before, after, 0.0, 0.0, pays=True)
            continue
        saved_s, cost_s = (before - after) * prices.even_s, len(swaps) * prices.swap_s
        gain = saved_s * prices.steps - cost_s
        if gain > best_gain:
            best, best_gain = Plan(swaps, slots, before, after, cost_s, saved_s, pays=gain > 0), gain
    return best
