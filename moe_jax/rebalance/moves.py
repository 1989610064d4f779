"""The moves that lead from one placement of experts to another, and the rounds in which they are made.

`expert_S` is the expert at each position, or E at a free position; rank r has positions r·L to (r+1)·L - 1. Shape
suffixes: E experts, S ≥ E positions, P ranks; L = S/P positions per rank. No rank has two copies of an expert.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """A swap of the experts at positions of two ranks or, if `copies`, a copy from the first to the second."""

    first: int
    second: int
    copies: bool = False


def moves_between(
    old_S: Sequence[int], new_S: Sequence[int], ranks: int, experts: int
) -> tuple[tuple[Move, ...], tuple[int, ...]]:
    """Find few moves that give every rank its experts in `new_S`; return them and the experts of all positions
    afterwards.

    The moves have to be made in order. Two experts that replace each other take one move, a cycle of n ranks n - 1.
    Positions of a rank are interchangeable, so an expert that stays on its rank keeps its position. An expert that a
    rank no longer needs is not erased; its position then counts as free.
    """
    per_rank, slots, moves = len(old_S) // ranks, list(old_S), list[Move]()
    goal_P = [{*new_S[rank * per_rank : (rank + 1) * per_rank]} - {experts} for rank in range(ranks)]
    while (move := _next_move(slots, goal_P, per_rank)) is not None:
        moves.append(move)
        one, two, copies = move
        slots[one], slots[two] = slots[one if copies else two], slots[one]
    final = (expert if expert in goal_P[slot // per_rank] else experts for slot, expert in enumerate(slots))
    return tuple(moves), tuple(final)


def _next_move(slots: Sequence[int], goal_P: Sequence[set[int]], per_rank: int) -> Move | None:
    """Choose the next move; None if every rank has the experts of its goal.

    Preferred is a swap that brings two experts to ranks that need them; then a copy of one to a position of which the
    expert is not needed elsewhere; then, in a cycle, a swap that brings one expert to a rank that needs it.
    """
    missing_P = [goal - {*slots[rank * per_rank : (rank + 1) * per_rank]} for rank, goal in enumerate(goal_P)]
    stray = [slot for slot, expert in enumerate(slots) if expert not in goal_P[slot // per_rank]]
    missing: dict[int, list[int]] = {}  # for each expert, stray positions of the ranks that still need it
    for slot in stray:
        for expert in missing_P[slot // per_rank]:
            missing.setdefault(expert, []).append(slot)
    pairs = [(one, two) for one in stray for two in missing.get(slots[one], ())]
    for one, two in pairs:
        if slots[two] in missing_P[one // per_rank]:
            return Move(one, two)
    count = Counter(slots)
    for two in stray:
        if missing_P[two // per_rank] and (count[slots[two]] > 1 or slots[two] not in missing):
            return Move(slots.index(min(missing_P[two // per_rank])), two, copies=True)
    return Move(*pairs[0]) if pairs else None


class SlotSwap(NamedTuple):
    """A move of a round: the rank of position `first` sends up, that of `second` down.

    Positions are numbered over all ranks; `row` is the block's row in the stack of its pipeline stage.
    """

    stage: int
    row: int
    first: int
    second: int
    first_gets: bool  # whether position `first` receives; else it retains its expert
    second_gets: bool


class TransferRound(NamedTuple):
    """Moves that are made concurrently; each second position is `shift` ranks above the first, cyclically."""

    shift: int
    moves: tuple[SlotSwap, ...]

    def sent_experts(self, ranks: int) -> int:
        """Return how many experts every rank sends, including those that no rank receives.

        If `shift` is half the number of ranks, up and down are the same direction.
        """
        return 1 if 2 * self.shift == ranks else 2


def transfer_rounds(moves: Sequence[tuple[int, int, Move]], per_rank: int, ranks: int) -> tuple[TransferRound, ...]:
    """Assign moves (stage, row, positions) to rounds: each to the first one after all earlier moves of its positions.

    `per_rank` is the number of positions of a rank. In a round each rank of a stage sends at most one expert up and one
    down.
    """
    shifts: list[int] = []
    rounds: list[list[SlotSwap]] = []
    busy: list[set[tuple[int, int, str]]] = []
    earliest: dict[tuple[int, int, int], int] = {}  # the first round in which a position may be used again
    for stage, row, (first, second, copies) in moves:
        gets = not copies, True
        shift = (second // per_rank - first // per_rank) % ranks
        if 2 * shift > ranks:
            first, second, shift, gets = second, first, ranks - shift, gets[::-1]
        back = "up" if 2 * shift == ranks else "down"
        needs = {(stage, first // per_rank, "up"), (stage, second // per_rank, back)}
        slots = [(stage, row, slot) for slot in (first, second)]
        number = max(earliest.get(slot, 0) for slot in slots)
        while number < len(rounds) and (shifts[number] != shift or busy[number] & needs):
            number += 1
        if number == len(rounds):
            shifts.append(shift)
            rounds.append([])
            busy.append(set())
        rounds[number].append(SlotSwap(stage, row, first, second, *gets))
        busy[number] |= needs
        earliest.update(dict.fromkeys(slots, number + 1))
    return tuple(TransferRound(shift, tuple(made)) for shift, made in zip(shifts, rounds, strict=True))
