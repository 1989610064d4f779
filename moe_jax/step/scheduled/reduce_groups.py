"""Gradients of one owner (embedding, a block, the head), in buckets, each of which is reduced over devices at once.

Gradients that are summed over the same mesh axes form a group, and a bucket is a slice of a group. A sum goes to all
devices, or it is scattered over P ranks, each of which gets its own part. Small gradients of a group share a flat
array: [n], or [P, n] with a row for each rank. A large gradient is a group of its own and keeps its shape: its buckets
are whole experts or rows, which compilers send as they lie in memory. To make it flat, TPUs would copy it twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ShardSpec
from moe_jax.schedule.grad_buckets import Bucket, elements_of, split_into_buckets

_SMALL = 2**20  # elements: smaller gradients share an array
_ITEM_BYTES = 4
_ROWS, _COLUMNS = 8, 128  # of a tile of TPUs


class ReduceAxes(NamedTuple):
    """The mesh axes of a sum: those over which the result is scattered, and the others, whose ranks all get the same
    result.
    """

    scattered: tuple[Axis, ...]
    others: tuple[Axis, ...]


class GradientGroup(NamedTuple):
    """Gradients that are summed over the same axes: in a flat array, or a large one in its own shape.

    Elements of the latter are numbered as if each rank's part of it were flat.
    """

    axes: ReduceAxes
    ranks: int  # P; 1 if nothing is scattered
    leaves: tuple[int, ...]  # numbers of leaves in the owner's tree
    shard: tuple[int, ...] | None = None  # the shape of a rank's part of a gradient in its own shape; None: flat
    slices: tuple[int, ...] = ()  # elements of the slices of `shard` that buckets may consist of, from coarse to fine


@dataclass(frozen=True)
class Reduction:
    """How an owner's gradients are summed: its groups, and their buckets in order of issue."""

    groups: tuple[GradientGroup, ...]
    shard_specs: tuple[ShardSpec, ...]  # how each leaf is sharded
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(
        cls,
        shapes: Tree,
        specs: Tree,
        shard_specs: Tree,
        mesh_shape: Mapping[str, int],
        bucket_cap_mb: float | None,
        powers_of_two: bool = False,
    ) -> "Reduction":
        """Build the reduction of gradients with these shapes (per device), in buckets of at most `bucket_cap_mb` MB
        (None: no limit). `powers_of_two`: on TPUs, see `_slice_sizes`.

        Each device gets only its own shard of the sum of a gradient that `shard_specs` shards. Gradients of parameters
        that no other device has are not summed.
        """
        leaf_shapes = [leaf.shape for leaf in jax.tree.leaves(shapes)]
        leaf_sizes = [math.prod(shape) for shape in leaf_shapes]
        leaf_specs = tuple(jax.tree.leaves(shard_specs))
        groups: list[GradientGroup] = []
        for axes, leaves in _leaves_by_axes(jax.tree.leaves(specs), leaf_specs, mesh_shape).items():
            ranks = math.prod(mesh_shape[axis] for axis in axes.scattered)
            small = tuple(leaf for leaf in leaves if leaf_sizes[leaf] < _SMALL)
            groups += [GradientGroup(axes, ranks, small)] if small else []
            for leaf in leaves:
                if leaf not in small:
                    group, spec = GradientGroup(axes, ranks, (leaf,)), leaf_specs[leaf]
                    shard = spec.shape(leaf_shapes[leaf], ranks)
                    limit = elements_of(bucket_cap_mb, _ITEM_BYTES * ranks, math.prod(shard))
                    if _keeps_shape(shard, spec, limit):
                        group = group._replace(shard=shard, slices=_slice_sizes(shard, spec, powers_of_two))
                    groups.append(group)
        # the largest first: tasks become shorter towards the end of a block's backward pass
        groups.sort(key=lambda group: -sum(leaf_sizes[leaf] for leaf in group.leaves))
        buckets = split_into_buckets(
            [sum(leaf_sizes[leaf] for leaf in group.leaves) // group.ranks for group in groups],
            bucket_cap_mb,
            item_bytes=[_ITEM_BYTES * group.ranks for group in groups],
            slices=[group.slices for group in groups],
        )
        return cls(tuple(groups), leaf_specs, buckets)

    def axes(self, bucket: int) -> ReduceAxes:
        """Return the mesh axes that a bucket is summed over."""
        return self.groups[self.buckets[bucket].group].axes

    def sent_bytes(self, mesh_shape: Mapping[str, int]) -> list[float]:
        """Return the bytes that leave a device for each bucket: the size times (P - 1)/P for a reduce-scatter, twice
        that for an all-reduce.
        """
        return [self._sent(self.groups[group], stop - start, mesh_shape) for group, start, stop in self.buckets]

    def _sent(self, group: GradientGroup, size: int, mesh_shape: Mapping[str, int]) -> float:
        others = math.prod(mesh_shape[axis] for axis in group.axes.others)
        return ((group.ranks - 1) + 2 * (others - 1) / others) * size * _ITEM_BYTES

    def pack(self, grads: Tree) -> list[Num[Array, "..."]]:
        """Return the array of each group from the owner's gradients: flat [n] or [P, n], or a large gradient as it is.

        Gradients that are in no group may be None.
        """
        leaves = jax.tree.leaves(grads, is_leaf=lambda leaf: leaf is None)
        return [self._packed(group, leaves) for group in self.groups]

    def _packed(self, group: GradientGroup, leaves: Sequence[jax.Array]) -> jax.Array:
        if group.shard:
            return leaves[group.leaves[0]]
        parts = [self.shard_specs[leaf].by_rank(leaves[leaf], group.ranks) for leaf in group.leaves]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def take(self, packed: Sequence[jax.Array], bucket: int) -> tuple[Num[Array, "..."], ShardSpec | None]:
        """Return one bucket of the arrays of `pack`: [n], or [P, n] of which each rank gets one row, with None.

        Or it is a slice of a gradient in its own shape, with the spec by which its sum is sharded.
        """
        number, start, stop = self.buckets[bucket]
        group, x = self.groups[number], packed[number]
        if group.shard:
            return _slice(x, self.shard_specs[group.leaves[0]], group, start, stop)
        is_whole = stop - start == x.shape[-1]
        return x if is_whole else jax.lax.slice_in_dim(x, start, stop, axis=-1), None

    def unpack(self, grads: Tree, sums: Sequence[Num[Array, "..."]]) -> Tree:
        """Return the owner's gradients with every bucket replaced by its sum, or by this device's shard of the sum."""
        leaves, structure = jax.tree.flatten(grads)
        for number, group in enumerate(self.groups):
            parts = [total for bucket, total in zip(self.buckets, sums, strict=True) if bucket.group == number]
            if group.shard:
                leaves[group.leaves[0]] = _joined(parts, group.shard)
                continue
            flat, start = _joined(parts, (sum(part.size for part in parts),)), 0
            for leaf in group.leaves:
                shape = self.shard_specs[leaf].shape(leaves[leaf].shape, group.ranks)
                stop = start + math.prod(shape)
                leaves[leaf] = flat[start:stop].reshape(shape)
                start = stop
        return jax.tree.unflatten(structure, leaves)


def _leaves_by_axes(
    specs: Sequence[PartitionSpec], shard_specs: Sequence[ShardSpec], mesh_shape: Mapping[str, int]
) -> dict[ReduceAxes, list[int]]:
    """Return the numbers of the leaves that are summed, by the axes of their sums."""
    found: dict[ReduceAxes, list[int]] = {}
    for leaf, (spec, own) in enumerate(zip(specs, shard_specs, strict=True)):
        axes = tuple(axis for axis in TOKEN_AXES if axis not in sharded_axes(spec) and mesh_shape[axis] > 1)
        if axes:
            others = tuple(axis for axis in axes if axis not in own.axes)
            found.setdefault(ReduceAxes(own.axes, others), []).append(leaf)
    return found


def _keeps_shape(shard: tuple[int, ...], spec: ShardSpec, limit: int) -> bool:
    """Whether a large gradient keeps its shape: a bucket of `limit` elements holds a row, and ranks get whole tiles."""
    if len(shard) < 2 or limit < shard[-1]:
        return False
    tile = {len(shard) - 1: _COLUMNS, len(shard) - 2: _ROWS}.get(spec.dim, 1)
    return not spec.axes or shard[spec.dim] % tile == 0


def _slice_sizes(shard: tuple[int, ...], spec: ShardSpec, powers_of_two: bool) -> tuple[int, ...]:
    """Return the elements of the slices of a rank's part: of an expert, if each rank has parts of all, of rows that
    fill tiles, and of a row.

    `powers_of_two`: slices have a power of two of rows, if that divides the gradient. XLA:TPU halves a reduce-scatter
    until its parts fit; where that leaves no whole tiles it scatters synchronously, and moves the rest.
    """
    *_, rows, columns = shard
    counts = [1 << bits for bits in reversed(range(rows.bit_length()))] if powers_of_two else []
    of_tiles = [each * _ROWS for each in counts if rows % (each * _ROWS) == 0] or [_ROWS]
    sizes = [*(each * columns for each in of_tiles), columns]
    if len(shard) > 2 and _has_all_of_first(spec):
        of_first = math.prod(shard[1:])
        return (of_first, *sizes[0 if of_first % sizes[0] == 0 else 1 :])
    return tuple(sizes)


def _has_all_of_first(spec: ShardSpec) -> bool:
    """Whether a rank's part of a gradient has all indices of its first dimension."""
    return not spec.axes or spec.dim > 0


def _slice(
    x: jax.Array, spec: ShardSpec, group: GradientGroup, start: int, stop: int
) -> tuple[Num[Array, "..."], ShardSpec]:
    """The elements [start, stop) of each rank's part of a gradient: whole indices of its first dimension, or rows."""
    assert group.shard is not None
    of_first, columns = math.prod(group.shard[1:]), group.shard[-1]
    if _has_all_of_first(spec):
        if stop - start > of_first:
            return jax.lax.slice_in_dim(x, start // of_first, stop // of_first), spec
        # without that dimension: XLA:TPU makes an all-reduce of a reduce-scatter if its size is 1
        first = start // of_first
        x, spec, start, stop = x[first], spec.unstacked(), start - first * of_first, stop - first * of_first
    if stop - start == x.size // group.ranks:
        return x, spec
    rows = spec.by_rank(x, group.ranks).reshape(*([group.ranks] if spec.axes else []), -1, columns)
    part = jax.lax.slice_in_dim(rows, start // columns, stop // columns, axis=rows.ndim - 2)
    return part, replace(spec, dim=0)


def _joined(parts: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Buckets in order as one array of this shape."""
    if len(parts) == 1:
        return parts[0].reshape(shape)
    of_first = math.prod(shape[1:])
    slices = shape[1:] if all(part.size % of_first == 0 for part in parts) else shape[-1:]
    return jnp.concatenate([part.reshape(-1, *slices) for part in parts]).reshape(shape)
