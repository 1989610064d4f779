"""Along what ops may be cut into parts: a constraint model (Lancet, section 5.2).

An op tells in which ways the tensors that it reads and writes may be cut together, so that the parts that it writes
make up the whole. A tensor keeps one axis throughout: to change it takes all parts, and ends a pipeline.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple


class CutAxis(StrEnum):
    """What a tensor is cut along."""

    WHOLE = "whole"
    SEQUENCES = "sequences"
    TOKENS = "tokens"  # of every sequence
    HEADS = "heads"
    FEATURES = "features"
    SLOTS = "slots"  # of every expert
    IRREGULAR = "irregular"  # rows by the sequences that they come from: from no row of an expert to all


class Op(NamedTuple):
    """A step of a block."""

    name: str
    task: str  # that it is part of, as schedules name it
    block: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    cuts: tuple[tuple[CutAxis, ...], ...]  # ways to run it in parts: of what it reads, then of what it writes


def find_cut(ops: Sequence[Op], allowed: Collection[CutAxis]) -> dict[str, CutAxis] | None:
    """What each tensor of `ops` is cut along if all of them run in parts; None if there is no way.

    A tensor may also stay whole where its op wants that.
    """
    return _extend(ops, {*allowed, CutAxis.WHOLE}, {})


def _extend(ops: Sequence[Op], allowed: set[CutAxis], known: dict[str, CutAxis]) -> dict[str, CutAxis] | None:
    if not ops:
        return known
    tensors = (*ops[0].reads, *ops[0].writes)
    for cut in ops[0].cuts:
        wanted = dict(zip(tensors, cut, strict=True))
        fits = all(known.get(tensor, axis) == axis and axis in allowed for tensor, axis in wanted.items())
        if fits and (found := _extend(ops[1:], allowed, known | wanted)) is not None:
            return found
    return None
