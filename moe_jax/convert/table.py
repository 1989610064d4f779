"""A whole model's tensors and arrays: which of our arrays each tensor belongs to, block by block."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from moe_jax.config import ModelConfig
from moe_jax.config.layer_layout import segments
from moe_jax.convert.family import Family, end_rows
from moe_jax.convert.tensors import Sizes, Tensor
from moe_jax.models.parameters import param_dims, param_shapes

Path = tuple[Any, ...]  # keys from the root of our parameters to an array


class ArraySlice(NamedTuple):
    """One of our arrays, or one block's share of it."""

    path: Path
    dims: tuple[str, ...]  # of the share
    ours: Sizes  # of these dimensions
    row: Tensor
    prefix: str  # in front of the names on disk

    def names(self) -> list[str]:
        """Of the tensors that it is made of: one, or one for each expert."""
        experts = range(self.ours["experts"]) if "{expert}" in self.row.name else [0]
        return [self.name(expert) for expert in experts]

    def name(self, expert: int) -> str:
        """Of the tensor of one expert."""
        return self.prefix + self.row.name.replace("{expert}", str(expert))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each of these tensors."""
        return self.row.shape(self.ours)


def places(model: ModelConfig, family: Family) -> dict[Path, list[ArraySlice]]:
    """Of each array that the family's table has: of a stacked one for each period from the bottom up."""
    dims, shapes = (
        _by_path(param_dims(model), is_leaf=lambda leaf: isinstance(leaf, tuple)),
        _by_path(param_shapes(model)),
    )
    found: dict[Path, list[ArraySlice]] = {}

    def add(path: Path, row: Tensor, prefix: str, stacked: bool) -> None:
        names, sizes = dims[path][stacked:], shapes[path].shape[stacked:]
        found.setdefault(path, []).append(ArraySlice(path, names, dict(zip(names, sizes, strict=True)), row, prefix))

    for row in end_rows(model):
        add((row.path,), row, "", False)
    for layer, (number, place, kind) in enumerate(_blocks(model)):
        for row in family.block(model, kind):
            add(("segments", number, place, *row.path.split(".")), row, f"model.layers.{layer}.", True)
    return found


def disk_shapes(found: dict[Path, list[ArraySlice]]) -> dict[str, tuple[int, ...]]:
    """Of all tensors by name."""
    return {name: each.shape for group in found.values() for each in group for name in each.names()}


def _blocks(model: ModelConfig) -> Iterator[tuple[int, int, str]]:
    """Segment, place in its period and kind of each block, from the bottom up."""
    for number, segment in enumerate(segments(model)):
        for _ in range(segment.repeats):
            for place, kind in enumerate(segment.kinds):
                yield number, place, kind


def _by_path(tree: Any, **settings: Any) -> dict[Path, Any]:
    return {
        tuple(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, **settings)
    }
