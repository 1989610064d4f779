"""Optimizer state sharded over the devices that have the same parameters (ZeRO: Rajbhandari et al. 2020, section 5).

Each device stores the moments of its own shard of such a parameter, gets the sum of the gradient of this shard alone,
updates the shard, and all-gathers the shards of the others.

P ranks over which an array is sharded, n numbers in the shard of each rank.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.parallel.trees import Tree


@dataclass(frozen=True)
class ShardSpec:
    """The mesh axes over which one dimension of an array is sharded. Without axes the array is replicated."""

    dim: int = 0
    axes: tuple[Axis, ...] = ()

    def local_shard(self, x: jax.Array) -> jax.Array:
        """Return this device's shard."""
        if not self.axes:
            return x
        size = x.shape[self.dim] // ranks_of(self.axes)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size, self.dim)

    def all_gather(self, x: jax.Array, platform: str, *of_size_1: Axis) -> jax.Array:
        """All-gather the shards of all devices. `of_size_1`: axes to name as well, along which there is one device.

        On TPU there is one all-gather per axis, because XLA:TPU cannot hide one over several axes.
        """
        with jax.named_scope("gather_parameters"):
            for axes in [(axis,) for axis in reversed(self.axes)] if platform == "tpu" else filter(None, [self.axes]):
                x = jax.lax.all_gather(x, (*axes, *of_size_1), axis=self.dim, tiled=True)
        return x

    def reduce_scatter(self, x: jax.Array, platform: str) -> jax.Array:
        """Reduce-scatter over the axes: return this device's shard of the sum.

        On TPU there is one reduce-scatter per axis, because XLA:TPU makes an all-reduce of one over several axes.
        """
        for axes in self.axes if platform == "tpu" else filter(None, [self.axes]):
            x = jax.lax.psum_scatter(x, axes, scatter_dimension=self.dim, tiled=True)
        return x

    def by_rank(self, x: jax.Array, ranks: int) -> Num[Array, "*P n"]:
        """Return the shards of all ranks, each flattened, as [P, n]; a replicated array is flattened."""
        if not self.axes:
            return x.ravel()
        shape = (*x.shape[: self.dim], ranks, x.shape[self.dim] // ranks, *x.shape[self.dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), self.dim, 0).reshape(ranks, -1)

    def from_ranks(self, rank_Pn: Num[Array, "P n"], shard: tuple[int, ...]) -> jax.Array:
        """Return the whole array from the flattened shards of all ranks, each of shape `shard`."""
        ranks = len(rank_Pn)
        parts = jnp.moveaxis(rank_Pn.reshape(ranks, *shard), 0, self.dim)
        return parts.reshape(*shard[: self.dim], ranks * shard[self.dim], *shard[self.dim + 1 :])

    def shape(self, whole: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Return the shape of a shard of an array of shape `whole`."""
        if not self.axes:
            return whole
        return (*whole[: self.dim], whole[self.dim] // ranks, *whole[self.dim + 1 :])

    def whole_shape(self, shard: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a whole array from that of a shard. Runs inside `shard_map`."""
        if not self.axes:
            return shard
        return (*shard[: self.dim], shard[self.dim] * ranks_of(self.axes), *shard[self.dim + 1 :])

    def unstacked(self) -> "ShardSpec":
        """Return the spec of one array, from the spec of a stack of them."""
        return replace(self, dim=self.dim - 1) if self.axes else self

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the sharding of the shards of a parameter that is sharded by `spec`."""
        entries: list[Any] = [*spec]
        if self.axes:
            entries[self.dim] = self.axes if len(self.axes) > 1 else self.axes[0]
        return PartitionSpec(*entries)


def ranks_of(axes: tuple[Axis, ...]) -> int:
    """Return P. Runs inside `shard_map`."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def shard_specs_of(
    shapes: Tree, specs: Tree, mesh_shape: Mapping[str, int], axes: Collection[str] = TOKEN_AXES
) -> Tree:
    """Return a ShardSpec for each parameter: a dimension that no mesh axis shards, over as many devices as divide it.

    The stacked dimension of blocks belongs to the pipeline axis: each block is sharded on its own. `axes`: those that
    may shard; ranks along the others have the same shards (hybrid sharding).
    """
    return jax.tree.map(lambda shape, spec: _shard_spec_of(shape.shape, spec, mesh_shape, axes), shapes, specs)


def unsharded_specs(specs: Tree) -> Tree:
    """Return the ShardSpecs of parameters that stay replicated."""
    return jax.tree.map(lambda _: ShardSpec(), specs)


def local_shards(shard_specs: Tree, tree: Tree) -> Tree:
    """Return this device's shards of a tree of whole arrays."""
    return jax.tree.map(lambda shard_spec, x: shard_spec.local_shard(x), shard_specs, tree)


def all_gather_params(shard_specs: Tree, tree: Tree, platform: str) -> Tree:
    """All-gather a tree of shards into whole arrays, one after another."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, all_gather_in_order(jax.tree.leaves(shard_specs), leaves, platform))


def all_gather_in_order(
    shard_specs: Sequence[ShardSpec], shards: Sequence[jax.Array], platform: str
) -> list[jax.Array]:
    """All-gather shards into whole arrays, one after another.

    Without this order compilers combine the collectives and assemble the pieces in other memory.
    """
    whole, before = list(shards), None
    for i, shard_spec in enumerate(shard_specs):
        if shard_spec.axes:
            shard = whole[i] if before is None else depend_on(whole[i], before, platform)
            whole[i] = before = shard_spec.all_gather(shard, platform)
    return whole


def shard_partition_specs(shard_specs: Tree, specs: Tree) -> Tree:
    """Return the shardings of a tree of shards."""
    return jax.tree.map(lambda shard_spec, spec: shard_spec.spec(spec), shard_specs, specs)


def _shard_spec_of(
    shape: tuple[int, ...], spec: PartitionSpec, mesh_shape: Mapping[str, int], axes: Collection[str]
) -> ShardSpec:
    sharded = sharded_axes(spec)
    free = [axis for axis in TOKEN_AXES if axis in axes and axis not in sharded and mesh_shape[axis] > 1]
    whole = [dim for dim in range(len(shape)) if dim >= len(spec) or spec[dim] is None]
    choices = [
        (math.prod(mesh_shape[axis] for axis in some), -dim, some)  # shards of the first dimension are contiguous
        for count in range(1, len(free) + 1)
        for some in itertools.combinations(free, count)
        for dim in whole
    ]
    fitting = [(ranks, place, some) for ranks, place, some in choices if shape[-place] % ranks == 0]
    if not fitting:
        return ShardSpec()
    _, place, most = max(fitting)
    return ShardSpec(-place, most)
