"""Optimiser states cut over the devices that hold the same parameters (ZeRO, stage 1).

Each device updates its own part of such a parameter, and the new parts are gathered.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.sharding import sharded_axes


class Cut(NamedTuple):
    """Over which mesh axes one dimension of an array is cut; no axes: the array stays whole."""

    dim: int = 0
    axes: tuple[Axis, ...] = ()

    def own(self, x: jax.Array) -> jax.Array:
        """This device's part."""
        if not self.axes:
            return x
        size = x.shape[self.dim] // math.prod(jax.lax.axis_size(axis) for axis in self.axes)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size, self.dim)

    def whole(self, x: jax.Array) -> jax.Array:
        """The parts of all devices."""
        if not self.axes:
            return x
        with jax.named_scope("gather_parameters"):
            return jax.lax.all_gather(x, self.axes, axis=self.dim, tiled=True)

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The sharding of the parts, for a parameter that is sharded like this."""
        entries: list[Any] = [*spec]
        if self.axes:
            entries[self.dim] = self.axes if len(self.axes) > 1 else self.axes[0]
        return PartitionSpec(*entries)


def cuts_of(shapes: Any, specs: Any, mesh_shape: Mapping[str, int]) -> Any:
    """A cut of each parameter: a dimension that is still whole, over as many devices as divide it."""
    return jax.tree.map(lambda shape, spec: _cut_of(shape.shape, spec, mesh_shape), shapes, specs)


def own_parts(cuts: Any, tree: Any) -> Any:
    """This device's parts of a tree of whole arrays."""
    return jax.tree.map(lambda cut, x: cut.own(x), cuts, tree, is_leaf=_is_cut)


def gathered(cuts: Any, tree: Any) -> Any:
    """Whole arrays of a tree of parts."""
    return jax.tree.map(lambda cut, x: cut.whole(x), cuts, tree, is_leaf=_is_cut)


def part_specs(cuts: Any, specs: Any) -> Any:
    """The shardings of a tree of parts."""
    return jax.tree.map(lambda cut, spec: cut.spec(spec), cuts, specs, is_leaf=_is_cut)


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, Cut)


def _cut_of(shape: tuple[int, ...], spec: PartitionSpec, mesh_shape: Mapping[str, int]) -> Cut:
    free = [axis for axis in TOKEN_AXES if axis not in sharded_axes(spec) and mesh_shape[axis] > 1]
    whole = [dim for dim in range(len(shape)) if dim >= len(spec) or spec[dim] is None]
    choices = [
        (math.prod(mesh_shape[axis] for axis in axes), shape[dim], dim, axes)
        for count in range(1, len(free) + 1)
        for axes in itertools.combinations(free, count)
        for dim in whole
    ]
    fitting = [choice for choice in choices if choice[1] % choice[0] == 0]
    if not fitting:
        return Cut()
    _, _, dim, axes = max(fitting)
    return Cut(dim, axes)
