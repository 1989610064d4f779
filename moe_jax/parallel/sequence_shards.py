"""Shards of sequences: the tokens of a device's context rank and tensor rank, and how tensor ranks share them.

B sequences of N tokens; C context ranks, t tensor ranks. Between layers the tensor ranks share the tokens of each
sequence, and inside layers heads and hidden widths. Sequence parallelism (Korthikanti et al. 2022): norms and the
residual stream have N/t tokens of each sequence. Before a layer its tokens are all-gathered, and after it the partial
results of all ranks are reduce-scattered. With one rank the functions do nothing. All functions run inside `shard_map`.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int, Num, Shaped

from moe_jax.parallel.context import zigzag_shard
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


def tp_sum(x: Any) -> Any:
    """Return the sums over all ranks of a tree of arrays."""
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        return x
    with jax.named_scope("tensor_sum"):
        return jax.lax.psum(x, Axis.TENSOR)


def own_count(whole: int) -> int:
    """Return how many of `whole` heads this rank has."""
    return whole // jax.lax.axis_size(Axis.TENSOR)


class LocalTokens(NamedTuple):
    """n = N/(C·t) tokens of each sequence, and for each the token that follows it."""

    input_Bn: Int[Array, "B n"]
    target_Bn: Int[Array, "B n"]


def local_tokens(token_BN1: Int[Array, "B N1"]) -> LocalTokens:
    """Return the tokens of this device out of whole sequences [B, N + 1] with the token that follows each."""
    return LocalTokens(local_shard(token_BN1[:, :-1]), local_shard(token_BN1[:, 1:]))


def local_shard(x_BN: Shaped[Array, "B N"]) -> Shaped[Array, "B n"]:
    """Return the values of the tokens of this device, out of one value per token."""
    return own_share(zigzag_shard(x_BN), 1)


def sum_over_sequences(x_B: Num[Array, "B ..."]) -> Num[Array, "B ..."]:
    """Sum x_B, of each sequence, over the ranks that have tokens of it. Not differentiable."""
    axes = tuple(axis for axis in (Axis.CONTEXT, Axis.TENSOR) if jax.lax.axis_size(axis) > 1)
    with jax.named_scope("sum_over_sequences"):
        return jax.lax.psum(x_B, axes) if axes else x_B
