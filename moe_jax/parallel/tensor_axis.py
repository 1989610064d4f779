"""The tensor axis: t ranks share the tokens of each sequence between layers, and heads and hidden widths inside them.

Sequence parallelism (Korthikanti et al. 2022): norms and the residual stream see N/t tokens of each sequence; in front
of a layer its tokens are gathered, and behind it the partial results of all ranks are summed, each rank's share to
itself. With one rank nothing happens. All functions run inside `shard_map`.
"""

import jax
from jaxtyping import Array, Float, Shaped

from moe_jax.parallel.mesh import Axis


def own_share(x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """This rank's share along `dim` of what all have."""
    ranks = jax.lax.axis_size(Axis.TENSOR)
    if ranks == 1:
        return x
    own = x.shape[dim] // ranks
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(Axis.TENSOR) * own, own, axis=dim)


def tp_all_gather(x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """The shares of all ranks, one behind the other along `dim`."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_gather"):
        return jax.lax.all_gather(x, Axis.TENSOR, axis=dim, tiled=True)


def share_of_sum(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """What each rank adds where the results of all are summed and `x`, which all have, is to be in the sum once."""
    return x / jax.lax.axis_size(Axis.TENSOR)


def tp_reduce_scatter(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """This rank's share along `dim` of the sum over all ranks."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_scatter"):
        return jax.lax.psum_scatter(x, Axis.TENSOR, scatter_dimension=dim, tiled=True)
