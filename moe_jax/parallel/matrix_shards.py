"""Whole matrices and means from shards of stacked matrices. Runs inside `shard_map`.

N matrices of this device, all of one shape. Their dimensions may be sharded over several mesh axes.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


def on_whole_matrices(
    function: Callable[[Float[Array, "n ..."]], Float[Array, "n ..."]], x: jax.Array, spec: PartitionSpec, stacked: int
) -> jax.Array:
    """Apply `function` to the whole matrices of which `x` has shards, and return this device's shards of the result.

    The first `stacked` dimensions of `x` count matrices, and the others are a matrix's own. `function` takes whole
    matrices [n, …] and keeps their shape. The ranks that share matrices exchange shards for whole matrices, so that
    each applies it to its part of the N matrices, or to zeros if there are fewer matrices than ranks.
    """
    stack, own = x.shape[:stacked], x.shape[stacked:]
    count = math.prod(stack)
    x = x.reshape(count, *own)
    # From the last axis to the first: ranks of the last one have neighbouring shards.
    moves = [(dim, axis) for dim in range(1, x.ndim) for axis in reversed(_axes(spec, stacked - 1 + dim))]
    if moves:
        ranks = math.prod(jax.lax.axis_size(axis) for _, axis in moves)
        x = jnp.pad(x, [(0, -count % ranks)] + [(0, 0)] * len(own))
    with jax.named_scope("gather_matrices"):
        for dim, axis in moves:
            x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=dim, tiled=True)
    x = function(x)
    with jax.named_scope("scatter_matrices"):
        for dim, axis in reversed(moves):
            x = jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=0, tiled=True)
    return x[:count].reshape(*stack, *own)


def mean_over(x: jax.Array, dims: Sequence[int], spec: PartitionSpec) -> jax.Array:
    """Return the mean over some dimensions of the whole array of which `x` is a shard; they are kept with size 1."""
    mean = x.mean(axis=tuple(dims), keepdims=True)
    axes = tuple(axis for dim in dims for axis in _axes(spec, dim))
    return jax.lax.pmean(mean, axes) if axes else mean


def _axes(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """Return the axes, of more than one rank, over which a dimension is sharded, the first with the largest strides."""
    entry = spec[dim] if dim < len(spec) else None
    names = entry if isinstance(entry, tuple) else (entry,) if entry is not None else ()
    return tuple(name for name in names if jax.lax.axis_size(name) > 1)
