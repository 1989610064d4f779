"""Gradients of one owner (embedding, a block, the head) as flat vectors, reduced over devices bucket by bucket.

A sum either goes to all devices, as [n], or a vector [P, n] is reduce-scattered and each of P ranks gets its own part
[n].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ShardSpec
from moe_jax.schedule.grad_buckets import Bucket, split_into_buckets

_SMALL = 2**20  # elements: smaller gradients share a vector
_ITEM_BYTES = 4


class ReduceGroup(NamedTuple):
    """The mesh axes of a sum: those over which the result is scattered, and the others, whose ranks all get the same
    result.
    """

    scattered: tuple[Axis, ...]
    others: tuple[Axis, ...]


class GradientBucket(NamedTuple):
    """Gradients that are flattened into one vector, or into one per rank, and summed over the same axes."""

    over: ReduceGroup
    ranks: int  # P; 1 if nothing is scattered
    leaves: tuple[int, ...]  # numbers of leaves in the owner's tree


@dataclass(frozen=True)
class Reduction:
    """How an owner's gradients are summed: its vectors, and chunks of them in order of issue."""

    vectors: tuple[GradientBucket, ...]
    shard_specs: tuple[ShardSpec, ...]  # how each leaf is sharded
    chunks: tuple[Bucket, ...]  # pieces of the vectors' last dimension n

    @classmethod
    def of(
        cls, shapes: Tree, specs: Tree, shard_specs: Tree, mesh_shape: Mapping[str, int], bucket_cap_mb: float | None
    ) -> "Reduction":
        """Build the reduction of gradients with these shapes (per device), in chunks of at most `bucket_cap_mb` MB
        (None: no limit).

        Each device gets only its own shard of the sum of a gradient that `shard_specs` shards. Gradients of parameters
        that no other device has are not summed.
        """
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
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
            vectors += [GradientBucket(over, ranks, (number,)) for number in numbers if number not in small]
        totals = [sum(sizes[number] for number in vector.leaves) // vector.ranks for vector in vectors]
        item_bytes = [_ITEM_BYTES * vector.ranks for vector in vectors]
        return cls(tuple(vectors), spec_of, split_into_buckets(totals, bucket_cap_mb, item_bytes))

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

    def flatten(self, grads: Tree) -> list[Num[Array, "*P n"]]:
        """Return the owner's gradients as vectors; gradients that are in no vector may be None."""
        leaves = jax.tree.leaves(grads, is_leaf=lambda leaf: leaf is None)
        parts = [
            [self.shard_specs[number].by_rank(leaves[number], vector.ranks) for number in vector.leaves]
            for vector in self.vectors
        ]
        return [part[0] if len(part) == 1 else jnp.concatenate(part, axis=-1) for part in parts]

    def take(self, vectors: Sequence[jax.Array], chunk: int) -> Num[Array, "*P n"]:
        """Return one chunk of the vectors."""
        group, start, stop = self.chunks[chunk]
        whole = stop - start == vectors[group].shape[-1]
        return vectors[group] if whole else jax.lax.slice_in_dim(vectors[group], start, stop, axis=-1)

    def restore(self, grads: Tree, sums: Sequence[Num[Array, " n"]]) -> Tree:
        """Return the owner's gradients with every chunk replaced by its sum, or by this device's shard of the sum."""
        leaves, structure = jax.tree.flatten(grads)
        for group, vector in enumerate(self.vectors):
            parts = [total for chunk, total in zip(self.chunks, sums, strict=True) if chunk.group == group]
            flat, start = parts[0] if len(parts) == 1 else jnp.concatenate(parts), 0
            for number in vector.leaves:
                shape = self.shard_specs[number].shape(leaves[number].shape, vector.ranks)
                stop = start + math.prod(shape)
                leaves[number] = flat[start:stop].reshape(shape)
                start = stop
        return jax.tree.unflatten(structure, leaves)
