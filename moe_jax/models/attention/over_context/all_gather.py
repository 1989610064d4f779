"""Attention over context ranks: keys and values of all of them, or what they are made of, are gathered first.

B sequences, n tokens of each that are this rank's, N of all C ranks; H heads of queries, G of keys and values, K width
of queries and keys, V of values.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.core import seen_before, weighted_values
from moe_jax.models.attention.over_context.ring import Make, Pair
from moe_jax.parallel.context import all_gather_tokens, context_ranks, own_positions, positions_of


def values(
    query_BnHK: Float[Array, "B n H K"],
    held: Pair,
    weights: Any,
    sink_H: Float[Array, " H"] | None,
    make: Make | None,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """The values that this rank's queries see. `make(weights, held)` gives keys and values; None: they are held."""
    own = query_BnHK.shape[1]
    position_N = jnp.concatenate([positions_of(rank, own) for rank in range(context_ranks())])
    seen_nN = seen_before(own_positions(own), position_N, window)
    everyone = all_gather_tokens(held[0]), all_gather_tokens(held[1])
    key_BNGK, value_BNGV = everyone if make is None else make(weights, everyone)
    return weighted_values(query_BnHK, key_BNGK, value_BNGV, seen_nN, scale, sink_H)
