"""Attention over context ranks: keys and values of all of them are gathered first.

B sequences, n tokens of each that are this rank's, N of all C ranks; H heads of queries, G of keys and values, K width
of queries and keys, V of values.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.core import seen_before, weighted_values
from moe_jax.parallel.context import context_ranks, gathered_tokens, own_positions, positions_of


def values(
    query_BnHK: Float[Array, "B n H K"],
    key_BnGK: Float[Array, "B n G K"],
    value_BnGV: Float[Array, "B n G V"],
    sink_H: Float[Array, " H"] | None,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """The values that this rank's queries see."""
    own = query_BnHK.shape[1]
    position_N = jnp.concatenate([positions_of(rank, own) for rank in range(context_ranks())])
    seen_nN = seen_before(own_positions(own), position_N, window)
    return weighted_values(query_BnHK, gathered_tokens(key_BnGK), gathered_tokens(value_BnGV), seen_nN, scale, sink_H)
