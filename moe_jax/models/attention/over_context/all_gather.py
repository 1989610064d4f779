"""Attention over context ranks that first all-gathers keys and values, or the latents that they are computed from.

B sequences, n tokens of this rank in each, N of all C ranks; H heads of queries, G of keys and values, K width of
queries and keys, V width of values.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.core import causal_mask, masked_attention
from moe_jax.models.attention.over_context.ring import Make, Pair
from moe_jax.parallel.context import all_gather_tokens, context_ranks, own_positions, positions_of


def values(
    query_BnHK: Float[Array, "B n H K"],
    kv: Pair,
    weights: Any,
    sink_H: Float[Array, " H"] | None,
    make: Make | None,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """Return the outputs for this rank's queries.

    `make(weights, kv)` computes keys and values; None: `kv` holds them.
    """
    own = query_BnHK.shape[1]
    position_N = jnp.concatenate([positions_of(rank, own) for rank in range(context_ranks())])
    mask_nN = causal_mask(own_positions(own), position_N, window)
    all_kv = all_gather_tokens(kv[0]), all_gather_tokens(kv[1])
    key_BNGK, value_BNGV = all_kv if make is None else make(weights, all_kv)
    return masked_attention(query_BnHK, key_BNGK, value_BNGV, mask_nN, scale, sink_H)
