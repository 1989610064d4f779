"""The ops of a forward pass and the axes along which each may be split: a constraint model (Lancet, section 5.2).

An op lists the combinations of axes along which the tensors that it reads and writes may be split together, so that the
parts that it writes make up the whole. A tensor has one axis throughout: changing it needs all parts, and ends a
pipeline.
"""

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from moe_jax.config import ModelConfig


class CutAxis(StrEnum):
    """The axis that a tensor is split along."""

    WHOLE = "whole"
    SEQUENCES = "sequences"
    TOKENS = "tokens"  # of every sequence
    HEADS = "heads"
    FEATURES = "features"
    SLOTS = "slots"  # of every expert
    RAGGED = "ragged"  # rows by their source sequences; an expert may have any number of them


class Op(NamedTuple):
    """One op of a block."""

    name: str
    task: str  # the schedule's task that it is part of
    block: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    cuts: tuple[tuple[CutAxis, ...], ...]  # possible splits: an axis for each tensor read, then for each tensor written


def find_cut(ops: Sequence[Op], allowed: Collection[CutAxis]) -> dict[str, CutAxis] | None:
    """Find an axis for each tensor so that all `ops` can run in parts; None if that is impossible.

    A tensor may also stay whole if its op allows it.
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


_WHOLE, _SEQUENCES, _TOKENS, _HEADS, _FEATURES = (
    CutAxis.WHOLE,
    CutAxis.SEQUENCES,
    CutAxis.TOKENS,
    CutAxis.HEADS,
    CutAxis.FEATURES,
)
_ROWS = (CutAxis.SLOTS, CutAxis.RAGGED)


def forward_ops(model: ModelConfig, kinds: Sequence[str]) -> tuple[Op, ...]:
    """The forward ops of blocks of these kinds, from the bottom up."""
    return tuple(op for block, kind in enumerate(kinds) for op in _block(model, kind, block))


def _block(model: ModelConfig, kind: str, block: int) -> Iterator[Op]:
    moe = model.moe

    def op(name: str, reads: str, writes: str, *cuts: tuple[CutAxis, ...], task: str = "attend") -> Op:
        """Make an op. Tensors have names of one letter or word; a block's output is the `x` of the next block."""
        own = tuple(f"{tensor}.{block}" for tensor in reads.split())
        made = tuple(f"x.{block + 1}" if tensor == "next" else f"{tensor}.{block}" for tensor in writes.split())
        return Op(name, task, block, own, made, cuts)

    yield op("norm", "x", "h", *_all(2, _SEQUENCES, _TOKENS))
    yield op("projections", "h", "q k v", *_all(4, _SEQUENCES, _TOKENS), (_WHOLE, _HEADS, _HEADS, _HEADS))
    yield op("attention", "q k v", "a", *_all(4, _SEQUENCES, _HEADS), (_TOKENS, _WHOLE, _WHOLE, _TOKENS))
    yield op("output", "a", "o", *_all(2, _SEQUENCES, _TOKENS), (_WHOLE, _FEATURES))
    has_mixer_only = kind == "dense" and not model.num_mlp_blocks
    after = "next" if has_mixer_only else "y"
    yield op("residual", "x o", after, *_all(3, _SEQUENCES, _TOKENS, _FEATURES))
    if has_mixer_only:
        return
    yield op("norm", "y", "z", *_all(2, _SEQUENCES, _TOKENS))
    has_mlp = kind == "dense" or moe.num_shared_experts > 0 or moe.dense_residual
    if has_mlp:
        yield op("mlp", "z", "m", *_all(2, _SEQUENCES, _TOKENS), (_WHOLE, _FEATURES))
    if kind == "moe":
        yield op("gate", "z", "choice", *_all(2, _SEQUENCES, _TOKENS))
        # tokens of all sequences compete for slots in their order, which splitting sequences would change
        yield op("permute", "z choice", "rows", *(((_SEQUENCES,) * 2 + _ROWS[1:],) if moe.gate_facts.splits else ()))
        yield op("dispatch", "rows", "received", *_all(2, *_ROWS), task="dispatch")
        yield op("expert", "received", "made", *_all(2, *_ROWS), task="expert")
        yield op("combine", "made", "returned", *_all(2, *_ROWS), task="combine")
        yield op("unpermute", "returned choice", "w", (CutAxis.RAGGED, _SEQUENCES, _SEQUENCES))
    added = "y" + " m" * has_mlp + " w" * (kind == "moe")
    yield op("residual", added, "next", *_all(len(added.split()) + 1, _SEQUENCES, _TOKENS, _FEATURES))


def _all(tensors: int, *axes: CutAxis) -> tuple[tuple[CutAxis, ...], ...]:
    """The same axis for all tensors of an op."""
    return tuple((axis,) * tensors for axis in axes)
