"""The ops of a forward pass and along what each may be cut: what partitions of it are made of."""

from collections.abc import Iterator, Sequence

from moe_jax.config import ModelConfig
from moe_jax.plan.axes import CutAxis, Op

_WHOLE, _SEQUENCES, _TOKENS, _HEADS, _FEATURES = (
    CutAxis.WHOLE,
    CutAxis.SEQUENCES,
    CutAxis.TOKENS,
    CutAxis.HEADS,
    CutAxis.FEATURES,
)
_ROWS = (CutAxis.SLOTS, CutAxis.IRREGULAR)


def forward_ops(model: ModelConfig, kinds: Sequence[str]) -> tuple[Op, ...]:
    """Of blocks of these kinds, from the bottom up."""
    return tuple(op for block, kind in enumerate(kinds) for op in _block(model, kind, block))


def _block(model: ModelConfig, kind: str, block: int) -> Iterator[Op]:
    moe = model.moe

    def op(name: str, reads: str, writes: str, *cuts: tuple[CutAxis, ...], task: str = "attend") -> Op:
        """Tensors of one letter or word each; a block's output is the next one's `x`."""
        own = tuple(f"{tensor}.{block}" for tensor in reads.split())
        made = tuple(f"x.{block + 1}" if tensor == "next" else f"{tensor}.{block}" for tensor in writes.split())
        return Op(name, task, block, own, made, cuts)

    yield op("norm", "x", "h", *_all(2, _SEQUENCES, _TOKENS))
    yield op("projections", "h", "q k v", *_all(4, _SEQUENCES, _TOKENS), (_WHOLE, _HEADS, _HEADS, _HEADS))
    yield op("attention", "q k v", "a", *_all(4, _SEQUENCES, _HEADS), (_TOKENS, _WHOLE, _WHOLE, _TOKENS))
    yield op("output", "a", "o", *_all(2, _SEQUENCES, _TOKENS), (_WHOLE, _FEATURES))
    yield op("residual", "x o", "y", *_all(3, _SEQUENCES, _TOKENS, _FEATURES))
    yield op("norm", "y", "z", *_all(2, _SEQUENCES, _TOKENS))
    has_mlp = kind == "dense" or moe.num_shared_experts > 0 or moe.dense_residual
    if has_mlp:
        yield op("mlp", "z", "m", *_all(2, _SEQUENCES, _TOKENS), (_WHOLE, _FEATURES))
    if kind == "moe":
        yield op("gate", "z", "choice", *_all(2, _SEQUENCES, _TOKENS))
        # tokens of all sequences compete for slots in their order, which parts of sequences would change
        yield op("order", "z choice", "rows", *(((_SEQUENCES,) * 2 + _ROWS[1:],) if moe.gate_facts.splits else ()))
        yield op("dispatch", "rows", "received", *_all(2, *_ROWS), task="dispatch")
        yield op("expert", "received", "made", *_all(2, *_ROWS), task="expert")
        yield op("combine", "made", "returned", *_all(2, *_ROWS), task="combine")
        yield op("inverse order", "returned choice", "w", (CutAxis.IRREGULAR, _SEQUENCES, _SEQUENCES))
    added = "y" + " m" * has_mlp + " w" * (kind == "moe")
    yield op("residual", added, "next", *_all(len(added.split()) + 1, _SEQUENCES, _TOKENS, _FEATURES))


def _all(tensors: int, *axes: CutAxis) -> tuple[tuple[CutAxis, ...], ...]:
    """All tensors of an op along the same axis."""
    return tuple((axis,) * tensors for axis in axes)
