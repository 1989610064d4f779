"""Gradients of one owner (embedding, a block, the head) as flat vectors, summed over devices chunk by chunk."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.schedule.grad_chunks import Chunk, cut

_SMALL = 2**20  # elements: smaller gradients travel together
_ITEM_BYTES = 4


class Vector(NamedTuple):
    """Gradients that are flattened into one vector and summed over the same axes."""

    axes: tuple[Axis, ...]
    leaves: tuple[int, ...]  # of the owner's tree


@dataclass(frozen=True)
class Reduction:
    """How an owner's gradients are summed: its vectors, and chunks of them in order of issue."""

    vectors: tuple[Vector, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, shapes: Any, specs: Any, mesh_shape: Mapping[str, int], chunk_mb: float | None) -> "Reduction":
        """For gradients of these shapes (per device) and sharding; chunks of at most `chunk_mb` MB (None: no limit).

        Gradients that no other device shares need no sum.
        """
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
        groups: dict[tuple[Axis, ...], list[int]] = {}
        for number, spec in enumerate(jax.tree.leaves(specs)):
            axes = tuple(axis for axis in TOKEN_AXES if axis not in sharded_axes(spec) and mesh_shape[axis] > 1)
            if axes:
                groups.setdefault(axes, []).append(number)
        vectors: list[Vector] = []
        for axes, numbers in groups.items():
            small = tuple(number for number in numbers if sizes[number] < _SMALL)
            vectors += [Vector(axes, small)] if small else []
            vectors += [Vector(axes, (number,)) for number in numbers if number not in small]
        totals = [sum(sizes[number] for number in vector.leaves) for vector in vectors]
        return cls(tuple(vectors), cut(totals, chunk_mb))

    def axes(self, chunk: int) -> tuple[Axis, ...]:
        """The mesh axes that a chunk is summed over."""
        return self.vectors[self.chunks[chunk].group].axes

    def sent_bytes(self, mesh_shape: Mapping[str, int]) -> list[float]:
        """What leaves a device for each chunk: twice its share, as each sum goes around once and comes back."""
        ranks = [math.prod(mesh_shape[axis] for axis in vector.axes) for vector in self.vectors]
        return [
            2 * (ranks[group] - 1) / ranks[group] * (stop - start) * _ITEM_BYTES for group, start, stop in self.chunks
        ]

    def flatten(self, grads: Any) -> list[jax.Array]:
        """The owner's gradients as vectors [n]; those that are in none may be None."""
        leaves = jax.tree.leaves(grads, is_leaf=lambda leaf: leaf is None)
        parts = [[leaves[number].ravel() for number in vector.leaves] for vector in self.vectors]
        return [part[0] if len(part) == 1 else jnp.concatenate(part) for part in parts]

    def take(self, vectors: Sequence[jax.Array], chunk: int) -> jax.Array:
        """One chunk [n] of the vectors."""
        group, start, stop = self.chunks[chunk]
        whole = stop - start == vectors[group].size
        return vectors[group] if whole else jax.lax.slice(vectors[group], (start,), (stop,))

    def restore(self, grads: Any, sums: Sequence[jax.Array]) -> Any:
        """The owner's gradients with every chunk replaced by its sum."""
        leaves, structure = jax.tree.flatten(grads)
        for group, vector in enumerate(self.vectors):
            parts = [total for chunk, total in zip(self.chunks, sums, strict=True) if chunk.group == group]
            flat, start = parts[0] if len(parts) == 1 else jnp.concatenate(parts), 0
            for number in vector.leaves:
                stop = start + leaves[number].size
                leaves[number] = flat[start:stop].reshape(leaves[number].shape)
                start = stop
        return jax.tree.unflatten(structure, leaves)
