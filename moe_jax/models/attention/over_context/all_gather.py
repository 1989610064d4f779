"""Attention over context ranks that first all-gathers keys and values, or the latents that they are computed from.

Longer sequences are computed in tiles, see `tiled`.

B sequences, n tokens of this rank in each, N of all C ranks; H heads of queries, G of keys and values, K width of
queries and keys, V width of values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.attention import tiles
from moe_jax.models.attention.core import causal_mask, masked_attention, same_document
from moe_jax.models.attention.over_context.ring import Make, Pair
from moe_jax.models.attention.tiled import tiled
from moe_jax.parallel.context import (
    all_gather_tokens,
    context_ranks,
    own_positions,
    positions_of,
    shard_of,
    zigzag_shard,
)
from moe_jax.parallel.mesh import Axis


def values(
    query_BnHK: Float[Array, "B n H K"],
    kv: Pair,
    weights: Any,
    sink_H: Float[Array, " H"] | None,
    document_BN: Int[Array, "B N"] | None,
    make: Make | None,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """Return the outputs for this rank's queries.

    `make(weights, kv)` computes keys and values; None: `kv` holds them. `document_BN` has the document of each token of
    all ranks, in the order of the sequence; None: all are of one.
    """
    own, ranks = query_BnHK.shape[1], context_ranks()
    positions = own_positions(own), jnp.concatenate([positions_of(rank, own) for rank in range(ranks)])
    documents = None
    if document_BN is not None:
        of_ranks = [shard_of(rank, document_BN) for rank in range(ranks)]
        documents = zigzag_shard(document_BN), jnp.concatenate(of_ranks, axis=1)
    all_kv = all_gather_tokens(kv[0]), all_gather_tokens(kv[1])
    key_BNGK, value_BNGV = all_kv if make is None else make(weights, all_kv)
    if ranks * own <= tiles.TILE:
        mask = causal_mask(*positions, window)
        mask = mask if documents is None else mask & same_document(*documents)
        return masked_attention(query_BnHK, key_BNGK, value_BNGV, mask, scale, sink_H)
    tile, pairs_CP2 = tiles.of_gathered(ranks, own, window, tiles.TILE)
    pairs_P2 = jnp.asarray(pairs_CP2)[jax.lax.axis_index(Axis.CONTEXT)]
    masks = positions, documents
    return tiled(query_BnHK, key_BNGK, value_BNGV, sink_H, pairs_P2, masks, tile, window, scale)
