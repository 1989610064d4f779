"""Which tokens of its sequences a device processes: those of its context rank and tensor rank.

B sequences of N tokens; C context ranks, t tensor ranks. All functions run inside `shard_map`.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Num, Shaped

from moe_jax.parallel.context import zigzag_shard
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.tensor_axis import own_share


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
