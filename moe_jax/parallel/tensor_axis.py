"""The tensor axis: t ranks share the tokens of each sequence between layers, and heads and hidden widths inside them.

Sequence parallelism (Korthikanti et al. 2022): norms and the residual stream see N/t tokens of each sequence; in front
of a layer its tokens are gathered, and behind it the partial results of all ranks are summed, each rank's share to
itself. With one rank nothing happens. All functions run inside `shard_map`.
"""

import jax
from jaxtyping import Array, Float, Int, Shaped

from moe_jax.parallel.mesh import Axis


def own_tokens(token_BN1: Int[Array, "B N1"]) -> Int[Array, "B n1"]:
    """This rank's N/t tokens of each sequence, and the one behind them."""
    ranks, length = jax.lax.axis_size(Axis.TENSOR), token_BN1.shape[1] - 1
    if ranks == 1:
        return token_BN1
    own = length // ranks
    return jax.lax.dynamic_slice_in_dim(token_BN1, jax.lax.axis_index(Axis.TENSOR) * own, own + 1, axis=1)


def gathered(x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """The shares of all ranks, one behind the other along `dim`."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_gather"):
        return jax.lax.all_gather(x, Axis.TENSOR, axis=dim, tiled=True)


def share_of_sum(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """What each rank adds where the results of all are summed and `x`, which all have, is to be in the sum once."""
    return x / jax.lax.axis_size(Axis.TENSOR)


def summed(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """This rank's share along `dim` of the sum over all ranks."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_scatter"):
        return jax.lax.psum_scatter(x, Axis.TENSOR, scatter_dimension=dim, tiled=True)
