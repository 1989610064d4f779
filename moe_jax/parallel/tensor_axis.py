"""The tensor axis: t ranks share the tokens of each sequence between layers, and heads and hidden widths inside layers.

Sequence parallelism (Korthikanti et al. 2022): norms and the residual stream have N/t tokens of each sequence. Before a
layer its tokens are all-gathered, and after it the partial results of all ranks are reduce-scattered. With one rank the
functions do nothing. All functions run inside `shard_map`.
"""

import jax
from jaxtyping import Array, Float, Shaped

from moe_jax.parallel.mesh import Axis


def own_share(x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """Return this rank's shard along `dim` of an array that is replicated."""
    ranks = jax.lax.axis_size(Axis.TENSOR)
    if ranks == 1:
        return x
    own = x.shape[dim] // ranks
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(Axis.TENSOR) * own, own, axis=dim)


def tp_all_gather(x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """Return the shards of all ranks, concatenated along `dim`."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_gather"):
        return jax.lax.all_gather(x, Axis.TENSOR, axis=dim, tiled=True)


def share_of_sum(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return 1/t of `x`, which is replicated, for a sum over all ranks in which it must count once."""
    return x / jax.lax.axis_size(Axis.TENSOR)


def tp_reduce_scatter(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """Return this rank's shard along `dim` of the sum over all ranks."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_scatter"):
        return jax.lax.psum_scatter(x, Axis.TENSOR, scatter_dimension=dim, tiled=True)
