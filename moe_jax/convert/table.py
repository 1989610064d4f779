"""The table of a whole model: the tensors on disk that make up each of our arrays."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.config.layer_layout import segments
from moe_jax.convert import mtp
from moe_jax.convert.family import Family, unstacked_rows
from moe_jax.convert.tensors import Sizes, Tensor
from moe_jax.models.parameters import param_dims, param_shapes

ArrayPath = tuple[Any, ...]  # keys from the root of our parameters to an array


class ArraySlice(NamedTuple):
    """One of our arrays, or one block's slice of a stacked array."""

    path: ArrayPath
    dims: tuple[str, ...]  # the dimensions of the slice
    ours: Sizes  # the sizes of these dimensions
    row: Tensor
    prefix: str  # the beginning of the names on disk

    def names(self) -> list[str]:
        """Return the names of its tensors: one, or one for each expert."""
        experts = range(self.ours["experts"]) if "{expert}" in self.row.name else [0]
        return [self.name(expert) for expert in experts]

    def name(self, expert: int) -> str:
        """Return the name of an expert's tensor, or of the only one."""
        return self.prefix + self.row.name.replace("{expert}", str(expert))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        return self.row.shape(self.ours)


def array_slices(model: ModelConfig, family: Family, copies: bool = False) -> dict[ArrayPath, list[ArraySlice]]:
    """Return the slices of each array in the family's table; a stacked array has one per period, from the bottom up.

    With `copies`, an array of which multi-token prediction stores a copy has a second slice, all of it, for that.
    """
    dims, shapes = (
        _by_path(param_dims(model), is_leaf=lambda leaf: isinstance(leaf, tuple)),
        _by_path(param_shapes(model)),
    )
    found: dict[ArrayPath, list[ArraySlice]] = {}

    def add(path: ArrayPath, row: Tensor, prefix: str, stacked: bool) -> None:
        names, sizes = dims[path][stacked:], shapes[path].shape[stacked:]
        found.setdefault(path, []).append(ArraySlice(path, names, dict(zip(names, sizes, strict=True)), row, prefix))

    for row in (family.ends or unstacked_rows)(model, family.root):
        add((row.path,), row, "", False)
    numbers = family.numbers(model) if family.numbers else [(layer, layer) for layer in range(model.num_blocks)]
    for layer, (number, place, kind, view) in enumerate(_blocks(model)):
        for row in family.rows(model, kind, view):
            on_disk = numbers[layer][not row.path.startswith("attention.")]
            add(("segments", number, place, *row.path.split(".")), row, f"{family.root}.layers.{on_disk}.", True)
        if layer == model.num_layers:
            above = mtp.prefix(model)
            for row in mtp.INPUT_ROWS:
                add(("segments", number, place, *row.path.split(".")), row, above, True)
            for row in (mtp.LAST_NORM, *(mtp.copy_rows(model) if copies else [])):
                add((row.path,), row, above, False)
    return found


def disk_shapes(found: dict[ArrayPath, list[ArraySlice]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, by name."""
    return {name: each.shape for group in found.values() for each in group for name in each.names()}


def _blocks(model: ModelConfig) -> Iterator[tuple[int, int, str, AttentionView]]:
    """Yield the segment, the place in its period, the kind and the view of each block, from the bottom up."""
    for number, segment in enumerate(segments(model)):
        for _ in range(segment.repeats):
            for place, (kind, view) in enumerate(zip(segment.kinds, segment.views, strict=True)):
                yield number, place, kind, view


def _by_path(tree: Any, **settings: Any) -> dict[ArrayPath, Any]:
    return {
        tuple(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, **settings)
    }
