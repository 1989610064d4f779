"""Reading parameters from Hugging Face files directly into sharded arrays: each process reads only its own shards."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from moe_jax.config.layer_layout import Stages
from moe_jax.convert.family import Family
from moe_jax.convert.files import Weights
from moe_jax.convert.fused import stored_family
from moe_jax.convert.table import ArrayPath, ArraySlice, array_slices

_ALIGNED = 64  # bytes; CPU devices use a buffer with this alignment without a copy


def read_params(weights: Weights, family: Family, stages: Stages, shapes: Any) -> Any:
    """Return the parameters in the layout of `stages`, in float32, with the shardings of `shapes`.

    Arrays without a tensor on disk are None. In addition to this process's shards, memory holds the part of one tensor
    that is being read.
    """
    found = array_slices(stages.model, stored_family(family, weights.names()))

    def read(path: tuple[Any, ...], wanted: jax.ShapeDtypeStruct) -> jax.Array | None:
        keys: ArrayPath = tuple(part.key for part in path)
        if keys not in found:
            return None
        rows = _periods(found[keys], keys, stages)
        shards: dict[str, NDArray[Any]] = {}

        def shard(index: tuple[slice, ...] | None) -> NDArray[Any]:
            """Read a shard once for all devices that have it."""
            assert index is not None, "arrays have dimensions"
            if str(index) not in shards:
                shards[str(index)] = _read_shard(weights, rows, index, wanted.shape, "segments" in keys)
            return shards[str(index)]

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)

    return jax.tree.map_with_path(read, shapes)


def _periods(group: list[ArraySlice], keys: ArrayPath, stages: Stages) -> list[ArraySlice | None]:
    """Return the slice that each row of a stacked array stores; None for a row that is not used."""
    if keys[0] != "segments":
        return list(group)
    total, *rows = stages.layout[keys[1]]
    stored: list[ArraySlice | None] = [None] * total
    for row, piece in zip(rows, group, strict=True):
        stored[row] = piece
    return stored


def _read_shard(
    weights: Weights, rows: Sequence[ArraySlice | None], index: tuple[slice, ...], shape: Sequence[int], stacked: bool
) -> NDArray[Any]:
    ranges = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
    out = _empty([len(each) for each in ranges])
    if not stacked:
        _fill(weights, rows[0], out, ranges)
        return out
    for own, row in zip(out, ranges[0], strict=True):
        _fill(weights, rows[row], own, ranges[1:])
    return out


def _fill(weights: Weights, piece: ArraySlice | None, out: NDArray[Any], ranges: list[range]) -> None:
    if piece is None:
        out[...] = 0
        return
    index, row = dict(zip(piece.dims, ranges, strict=True)), piece.row
    is_per_expert = "{expert}" in row.name
    if not is_per_expert and "experts" not in row.dims:
        row.copy_in(weights[piece.name(0)], out, piece.dims, index, piece.ours)
        return
    assert piece.dims[0] == "experts"
    for own, expert in zip(out, index["experts"], strict=True):  # one at a time, to save memory
        if is_per_expert:
            row.copy_in(weights[piece.name(expert)], own, piece.dims[1:], index, piece.ours)
        else:
            one = index | {"experts": range(expert, expert + 1)}
            row.copy_in(weights[piece.name(0)], own[None], piece.dims, one, piece.ours)


def _empty(shape: Sequence[int]) -> NDArray[np.float32]:
    """Return an uninitialized array that is aligned, since CPU devices would copy any other."""
    size = 4 * int(np.prod(shape))
    buffer = np.empty(size + _ALIGNED, np.uint8)
    start = -buffer.ctypes.data % _ALIGNED
    return buffer[start : start + size].view(np.float32).reshape(shape)
