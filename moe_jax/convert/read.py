"""Parameters from Hugging Face files, straight to where a mesh has them: of each device its own part is read."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from moe_jax.config.layer_layout import Stages
from moe_jax.convert.family import Family
from moe_jax.convert.files import Weights
from moe_jax.convert.fused import as_stored
from moe_jax.convert.table import ArraySlice, Path, places

_ALIGNED = 64  # bytes: what begins there CPU devices take as it is


def read_params(weights: Weights, family: Family, stages: Stages, shapes: Any) -> Any:
    """Parameters as stages hold them, float32, placed as the shapes' shardings say; None for what no tensor has.

    Beside this process's parts, memory holds what is read of one tensor.
    """
    found = places(stages.model, as_stored(family, weights.names()))

    def read(path: tuple[Any, ...], wanted: jax.ShapeDtypeStruct) -> jax.Array | None:
        keys: Path = tuple(part.key for part in path)
        if keys not in found:
            return None
        rows = _periods(found[keys], keys, stages)
        parts: dict[str, NDArray[Any]] = {}

        def part(index: tuple[slice, ...] | None) -> NDArray[Any]:
            """Read once for all devices that have it."""
            assert index is not None, "arrays have dimensions"
            if str(index) not in parts:
                parts[str(index)] = _part(weights, rows, index, wanted.shape, "segments" in keys)
            return parts[str(index)]

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)

    return jax.tree.map_with_path(read, shapes)


def _periods(group: list[ArraySlice], keys: Path, stages: Stages) -> list[ArraySlice | None]:
    """What each row of a stacked array holds; None: a row that is not used."""
    if keys[0] != "segments":
        return list(group)
    total, *rows = stages.layout[keys[1]]
    held: list[ArraySlice | None] = [None] * total
    for row, place in zip(rows, group, strict=True):
        held[row] = place
    return held


def _part(
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


def _fill(weights: Weights, place: ArraySlice | None, out: NDArray[Any], ranges: list[range]) -> None:
    if place is None:
        out[...] = 0
        return
    index, row = dict(zip(place.dims, ranges, strict=True)), place.row
    of_each = "{expert}" in row.name
    if not of_each and "experts" not in row.dims:
        row.copy_in(weights[place.name(0)], out, place.dims, index, place.ours)
        return
    assert place.dims[0] == "experts"
    for own, expert in zip(out, index["experts"], strict=True):  # one at a time, for the sake of memory
        if of_each:
            row.copy_in(weights[place.name(expert)], own, place.dims[1:], index, place.ours)
        else:
            one = index | {"experts": range(expert, expert + 1)}
            row.copy_in(weights[place.name(0)], own[None], place.dims, one, place.ours)


def _empty(shape: Sequence[int]) -> NDArray[np.float32]:
    """Aligned, or CPU devices would copy it."""
    size = 4 * int(np.prod(shape))
    buffer = np.empty(size + _ALIGNED, np.uint8)
    start = -buffer.ctypes.data % _ALIGNED
    return buffer[start : start + size].view(np.float32).reshape(shape)
