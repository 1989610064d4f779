"""Which tokens of the sequences that a device is given are its own: those of its context rank and tensor rank."""

from typing import NamedTuple

from jaxtyping import Array, Int

from moe_jax.parallel.context import own_pieces
from moe_jax.parallel.tensor_axis import own_share


class OwnTokens(NamedTuple):
    """n = N/(C·t) tokens of each sequence, and the token behind each of them."""

    input_Bn: Int[Array, "B n"]
    target_Bn: Int[Array, "B n"]


def own_tokens(token_BN1: Int[Array, "B N1"]) -> OwnTokens:
    """Out of whole sequences and the token behind them. Runs inside `shard_map`."""
    return OwnTokens(own_part(token_BN1[:, :-1]), own_part(token_BN1[:, 1:]))


def own_part(x_BN: Int[Array, "B N"]) -> Int[Array, "B n"]:
    """Of numbers of each token. Runs inside `shard_map`."""
    return own_share(own_pieces(x_BN), 1)
