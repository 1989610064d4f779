"""Attention over context ranks that first all-gathers keys and values, or the latents that they are computed from.

Longer sequences are computed in tiles, see `tiled`.

B sequences, n tokens of this rank in each, N of all C ranks; H heads of queries, G of keys and values, K width of
queries and keys, V width of values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.attention import tiles
from moe_jax.models.attention.core import causal_mask, masked_attention, same_document
from moe_jax.models.attention.over_context.ring import Make, Pair
from moe_jax.models.attention.tile_products import TileInputs, by_group, no_logits, with_largest
from moe_jax.models.attention.tiled import Masks, tiled
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
    positions, documents = masks = _masks(own, document_BN)
    all_kv = all_gather_tokens(kv[0]), all_gather_tokens(kv[1])
    key_BNGK, value_BNGV = all_kv if make is None else make(weights, all_kv)
    if ranks * own <= tiles.TILE:
        mask = causal_mask(*positions, window)
        mask = mask if documents is None else mask & same_document(*documents)
        return masked_attention(query_BnHK, key_BNGK, value_BNGV, mask, scale, sink_H)
    tile, pairs_P2 = _pairs(own, window)
    return tiled(query_BnHK, key_BNGK, value_BNGV, sink_H, pairs_P2, masks, tile, window, scale)


def max_logits(
    query_BnHK: Float[Array, "B n H K"],
    sent: Any,
    keys_of: Callable[[Any], jax.Array],
    document_BN: Int[Array, "B N"] | None,
    window: int | None,
    scale: float,
) -> Float[Array, " H"]:
    """Return the largest logit of each head over this rank's queries and the keys of all ranks, without a gradient.

    `keys_of` computes keys from what is gathered. See `values`.
    """
    key_BNGK = jax.lax.stop_gradient(keys_of(jax.tree.map(all_gather_tokens, sent)))
    query, masks = by_group(query_BnHK, key_BNGK), _masks(query_BnHK.shape[1], document_BN)
    tile, pairs_P2 = _pairs(query_BnHK.shape[1], window)
    # without it JAX would find the masks equal in all blocks, and compute those of all tiles before the scan over these
    pairs_P2, masks, query = jax.lax.optimization_barrier((pairs_P2, masks, query))
    inputs = TileInputs(query, key_BNGK, key_BNGK, pairs_P2, masks[0], masks[1], tile, window, scale)
    return with_largest(no_logits(query), inputs).reshape(-1)


def _masks(own: int, document_BN: jax.Array | None) -> Masks:
    """Return the positions, and the documents if there are several, of this rank's tokens and of those of all ranks."""
    ranks = range(context_ranks())
    positions = own_positions(own), jnp.concatenate([positions_of(rank, own) for rank in ranks])
    if document_BN is None:
        return positions, None
    of_ranks = [shard_of(rank, document_BN) for rank in ranks]
    return positions, (zigzag_shard(document_BN), jnp.concatenate(of_ranks, axis=1))


def _pairs(own: int, window: int | None) -> tuple[int, Int[Array, "P 2"]]:
    """Return the tile length, and this rank's pairs of tiles."""
    tile, pairs_CP2 = tiles.of_gathered(context_ranks(), own, window, tiles.TILE)
    return tile, jnp.asarray(pairs_CP2)[jax.lax.axis_index(Axis.CONTEXT)]
