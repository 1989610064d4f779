"""Gradients of one owner (embedding, a block, the head), reduced over devices bucket by bucket.

Small gradients share a flat vector. A sum either goes to all devices, as [n], or a vector [P, n] is reduce-scattered
and each of P ranks gets its own part [n]. A large gradient is split into slices of its own shape (experts, or rows of a
matrix), which compilers send as they lie in memory: to make it flat, TPUs would copy it twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ShardSpec
from moe_jax.schedule.grad_buckets import Bucket, elements_of, split_into_buckets

_SMALL = 2**20  # elements: smaller gradients share a vector
_ITEM_BYTES = 4
_ROWS, _COLUMNS = 8, 128  # of a tile of TPUs


class ReduceGroup(NamedTuple):
    """The mesh axes of a sum: those over which the result is scattered, and the others, whose ranks all get the same
    result.
    """

    scattered: tuple[Axis, ...]
    others: tuple[Axis, ...]


class GradientBucket(NamedTuple):
    """Gradients that are summed over the same axes, flattened into one vector, or into one per rank.

    A single one that is large enough keeps its shape; its elements are numbered as in the flat vector.
    """

    over: ReduceGroup
    ranks: int  # P; 1 if nothing is scattered
    leaves: tuple[int, ...]  # numbers of leaves in the owner's tree
    shard: tuple[int, ...] | None = None  # the shape of a rank's part of the gradient that keeps its shape
    slices: tuple[int, ...] = ()  # elements of a slice of it, from coarse to fine

    @classmethod
    def of_large(
        cls,
        over: ReduceGroup,
        ranks: int,
        leaf: int,
        whole: tuple[int, ...],
        spec: ShardSpec,
        cap_mb: float | None,
        powers_of_two: bool,
    ) -> "GradientBucket":
        """The bucket of one gradient, in its own shape if that has whole tiles and a bucket holds one of its rows.

        `powers_of_two`: slices have a power of two of rows, if that divides the gradient. XLA:TPU halves a
        reduce-scatter until its parts fit; where that leaves no whole tiles it scatters synchronously, and moves the
        rest.
        """
        shard, flat = spec.shape(whole, ranks), cls(over, ranks, (leaf,))
        limit = elements_of(cap_mb, _ITEM_BYTES * ranks, math.prod(shard))
        tiles = dict(zip(reversed(range(len(shard))), (_COLUMNS, _ROWS), strict=False))
        in_tiles = not spec.axes or shard[spec.dim] % tiles.get(spec.dim, 1) == 0
        if len(shard) < 2 or limit < shard[-1] or not in_tiles:
            return flat
        of_first = math.prod(shard[1:])  # elements at an index of the first dimension
        counts = [1 << bits for bits in reversed(range(shard[-2].bit_length()))] if powers_of_two else []
        rows = [each * _ROWS for each in counts if shard[-2] % (each * _ROWS) == 0] or [_ROWS]
        slices: tuple[int, ...] = (*(each * shard[-1] for each in rows), shard[-1])
        if len(shard) > 2 and (not spec.axes or spec.dim > 0):
            slices = (of_first, *slices[0 if of_first % slices[0] == 0 else 1 :])
        return flat._replace(shard=shard, slices=slices)


@dataclass(frozen=True)
class Reduction:
    """How an owner's gradients are summed: its vectors, and chunks of them in order of issue."""

    vectors: tuple[GradientBucket, ...]
    shard_specs: tuple[ShardSpec, ...]  # how each leaf is sharded
    chunks: tuple[Bucket, ...]  # pieces of the vectors' last dimension n

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
        """Build the reduction of gradients with these shapes (per device), in chunks of at most `bucket_cap_mb` MB
        (None: no limit). `powers_of_two`: those of TPUs, see `GradientBucket.of_large`.

        Each device gets only its own shard of the sum of a gradient that `shard_specs` shards. Gradients of parameters
        that no other device has are not summed.
        """
        wholes = [leaf.shape for leaf in jax.tree.leaves(shapes)]
        sizes = [math.prod(shape) for shape in wholes]
        spec_of = tuple(jax.tree.leaves(shard_specs))
        groups: dict[ReduceGroup, list[int]] = {}
        for number, (spec, own) in enumerate(zip(jax.tree.leaves(specs), spec_of, strict=True)):
            axes = tuple(axis for axis in TOKEN_AXES if axis not in sharded_axes(spec) and mesh_shape[axis] > 1)
            if axes:
                over = ReduceGroup(own.axes, tuple(axis for axis in axes if axis not in own.axes))
                groups.setdefault(over, []).append(number)
        vectors: list[GradientBucket] = []
        for over, numbers in groups.items():
            ranks = math.prod(mesh_shape[axis] for axis in over.scattered)
            small = tuple(number for number in numbers if sizes[number] < _SMALL)
            vectors += [GradientBucket(over, ranks, small)] if small else []
            vectors += [
                GradientBucket.of_large(
                    over, ranks, number, wholes[number], spec_of[number], bucket_cap_mb, powers_of_two
                )
                for number in numbers
                if number not in small
            ]
        # the largest first: tasks become shorter towards the end of a block's backward pass
        vectors.sort(key=lambda vector: -sum(sizes[number] for number in vector.leaves))
        totals = [sum(sizes[number] for number in vector.leaves) // vector.ranks for vector in vectors]
        item_bytes = [_ITEM_BYTES * vector.ranks for vector in vectors]
        slices = [vector.slices for vector in vectors]
        return cls(tuple(vectors), spec_of, split_into_buckets(totals, bucket_cap_mb, item_bytes, slices))

    def over(self, chunk: int) -> ReduceGroup:
        """Return the mesh axes that a chunk is summed over."""
        return self.vectors[self.chunks[chunk].group].over

    def sent_bytes(self, mesh_shape: Mapping[str, int]) -> list[float]:
        """Return the bytes that leave a device for each chunk: the size times (P - 1)/P for a reduce-scatter, twice
        that for an all-reduce.
        """
        return [self._sent(self.vectors[group], stop - start, mesh_shape) for group, start, stop in self.chunks]

    def _sent(self, vector: GradientBucket, size: int, mesh_shape: Mapping[str, int]) -> float:
        others = math.prod(mesh_shape[axis] for axis in vector.over.others)
        return ((vector.ranks - 1) + 2 * (others - 1) / others) * size * _ITEM_BYTES

    def vectors_of(self, grads: Tree) -> list[Num[Array, "..."]]:
        """Return the owner's gradients as vectors [n] or [P, n], and large ones as they are.

        Gradients that are in no vector may be None.
        """
        leaves = jax.tree.leaves(grads, is_leaf=lambda leaf: leaf is None)
        return [self._vector(vector, leaves) for vector in self.vectors]

    def _vector(self, vector: GradientBucket, leaves: Sequence[jax.Array]) -> jax.Array:
        if vector.shard:
            return leaves[vector.leaves[0]]
        parts = [self.shard_specs[number].by_rank(leaves[number], vector.ranks) for number in vector.leaves]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def take(self, vectors: Sequence[jax.Array], chunk: int) -> tuple[Num[Array, "..."], ShardSpec | None]:
        """Return one chunk of the vectors: [n], or [P, n] of which each rank gets one row, with None.

        Or it is a slice of a gradient in its own shape, with the spec by which its sum is sharded.
        """
        group, start, stop = self.chunks[chunk]
        vector, x = self.vectors[group], vectors[group]
        if vector.shard:
            return _slice(x, self.shard_specs[vector.leaves[0]], vector, start, stop)
        whole = stop - start == x.shape[-1]
        part = x if whole else jax.lax.slice_in_dim(x, start, stop, axis=-1)
        return part, None

    def restore(self, grads: Tree, sums: Sequence[Num[Array, "..."]]) -> Tree:
        """Return the owner's gradients with every chunk replaced by its sum, or by this device's shard of the sum."""
        leaves, structure = jax.tree.flatten(grads)
        for group, vector in enumerate(self.vectors):
            parts = [total for chunk, total in zip(self.chunks, sums, strict=True) if chunk.group == group]
            if vector.shard:
                leaves[vector.leaves[0]] = _joined(parts, vector.shard)
                continue
            flat, start = _joined(parts, (sum(part.size for part in parts),)), 0
            for number in vector.leaves:
                shape = self.shard_specs[number].shape(leaves[number].shape, vector.ranks)
                stop = start + math.prod(shape)
                leaves[number] = flat[start:stop].reshape(shape)
                start = stop
        return jax.tree.unflatten(structure, leaves)


def _slice(
    x: jax.Array, spec: ShardSpec, vector: GradientBucket, start: int, stop: int
) -> tuple[Num[Array, "..."], ShardSpec]:
    """The elements [start, stop) of each rank's part of a gradient: whole indices of its first dimension, or rows."""
    assert vector.shard is not None
    of_first, columns = math.prod(vector.shard[1:]), vector.shard[-1]
    by_first = not spec.axes or spec.dim > 0
    if by_first and stop - start > of_first:
        return jax.lax.slice_in_dim(x, start // of_first, stop // of_first), spec
    if by_first:  # without that dimension: XLA:TPU makes an all-reduce of a reduce-scatter if its size is 1
        first = start // of_first
        x, spec, start, stop = x[first], spec.unstacked(), start - first * of_first, stop - first * of_first
    if stop - start == x.size // vector.ranks:
        return x, spec
    rows = spec.by_rank(x, vector.ranks).reshape(*([vector.ranks] if spec.axes else []), -1, columns)
    part = jax.lax.slice_in_dim(rows, start // columns, stop // columns, axis=rows.ndim - 2)
    return part, replace(spec, dim=0)


def _joined(parts: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Chunks in order as one array of this shape."""
    if len(parts) == 1:
        return parts[0].reshape(shape)
    of_first = math.prod(shape[1:])
    slices = shape[1:] if all(part.size % of_first == 0 for part in parts) else shape[-1:]
    return jnp.concatenate([part.reshape(-1, *slices) for part in parts]).reshape(shape)
