"""Which tokens of the sequences that a device is given are its own: those of its context rank and tensor rank."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Num

from moe_jax.parallel.context import zigzag_shard
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.tensor_axis import own_share


class OwnTokens(NamedTuple):
    """n = N/(C·t) tokens of each sequence, and the token behind each of them."""

    input_Bn: Int[Array, "B n"]
    target_Bn: Int[Array, "B n"]


def local_tokens(token_BN1: Int[Array, "B N1"]) -> OwnTokens:
    """Out of whole sequences and the token behind them. Runs inside `shard_map`."""
    return OwnTokens(local_shard(token_BN1[:, :-1]), local_shard(token_BN1[:, 1:]))


def local_shard(x_BN: Int[Array, "B N"]) -> Int[Array, "B n"]:
    """Of numbers of each token. Runs inside `shard_map`."""
    return own_share(zigzag_shard(x_BN), 1)


def sum_over_sequences(x_B: Num[Array, "B ..."]) -> Num[Array, "B ..."]:
    """Of each sequence, over the ranks that have tokens of it. Not to be differentiated. Runs inside `shard_map`."""
    axes = tuple(axis for axis in (Axis.CONTEXT, Axis.TENSOR) if jax.lax.axis_size(axis) > 1)
    with jax.named_scope("sum_over_sequences"):
        return jax.lax.psum(x_B, axes) if axes else x_B
