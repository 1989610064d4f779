"""Attention of queries to keys in tiles, with a backward pass of its own. Its memory is linear in the number of tokens.

The forward pass keeps the log-sum-exp of each query's logits, and the backward pass computes the logits of a pair of
tiles again (Dao et al. 2022, "FlashAttention").

B sequences, n queries and m keys of each, N tokens that are both; H heads of queries, G of keys and values; K width of
queries and keys, V width of values; P pairs of tiles.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.models.attention import tiles
from moe_jax.models.attention.tile_products import (
    Gradients,
    TileInputs,
    accumulate,
    accumulate_gradients,
    backward_inputs,
    by_group,
    initial_sums,
    outputs,
    sink_gradient,
    zero_gradients,
)

Positions = tuple[jax.Array, jax.Array]  # [n] of queries and [m] of keys
Documents = tuple[jax.Array, jax.Array]  # numbers of the documents [B, n] of queries and [B, m] of keys
Masks = tuple[Positions, Documents | None]
# the pairs of tiles; a scheduled step that scans its blocks holds them as a numpy constant
Pairs = jax.Array | np.ndarray
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, Pairs, Masks, jax.Array, jax.Array]


def whole_sequence(
    query_BNHK: Float[Array, "B N H K"],
    key_BNGK: Float[Array, "B N G K"],
    value_BNGV: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
    sink_H: Float[Array, " H"] | None = None,
    document_BN: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N H V"]:
    """Return causal attention of all tokens of a sequence, which are on one rank.

    Sequences are padded to whole tiles. Padding comes last, so that no token sees it.
    """
    length = query_BNHK.shape[1]
    tile, pairs_P2 = tiles.of_sequence(length, window, tiles.TILE)
    padding = -length % tile

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) if padding else x

    position_N = jnp.arange(length + padding)
    documents = None if document_BN is None else (padded(document_BN), padded(document_BN))
    arrays = map(padded, (query_BNHK, key_BNGK, value_BNGV))
    masks = (position_N, position_N), documents
    return tiled(*arrays, sink_H, jnp.asarray(pairs_P2), masks, tile, window, scale)[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def tiled(
    query_BnHK: Float[Array, "B n H K"],
    key_BmGK: Float[Array, "B m G K"],
    value_BmGV: Float[Array, "B m G V"],
    sink_H: Float[Array, " H"] | None,
    pairs_P2: Int[Array, "P 2"],
    masks: Masks,
    tile: int,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """Return the outputs for the queries, computing these pairs of tiles. Both lengths are multiples of `tile`."""
    return _forward(query_BnHK, key_BmGK, value_BmGV, sink_H, pairs_P2, masks, tile, window, scale)[0]


def _forward(
    query_BnHK: jax.Array,
    key_BmGK: jax.Array,
    value_BmGV: jax.Array,
    sink_H: jax.Array | None,
    pairs_P2: jax.Array,
    masks: Masks,
    tile: int,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Residuals]:
    inputs = _inputs(query_BnHK, key_BmGK, value_BmGV, pairs_P2, masks, tile, window, scale)
    sums = accumulate(initial_sums(inputs.query_BnGJK, value_BmGV.shape[-1], sink_H), inputs)
    out_BnHV, log_sum_BGJn = outputs(sums, value_BmGV.dtype)
    return out_BnHV, (query_BnHK, key_BmGK, value_BmGV, sink_H, pairs_P2, masks, out_BnHV, log_sum_BGJn)


def _backward(
    tile: int, window: int | None, scale: float, residuals: Residuals, dout_BnHV: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None, None]:
    query_BnHK, key_BmGK, value_BmGV, sink_H, pairs_P2, masks, out_BnHV, log_sum_BGJn = residuals
    inputs = _inputs(query_BnHK, key_BmGK, value_BmGV, pairs_P2, masks, tile, window, scale)
    saved = backward_inputs(by_group(dout_BnHV, key_BmGK), by_group(out_BnHV, key_BmGK), log_sum_BGJn)
    zeros = Gradients(jnp.zeros(inputs.query_BnGJK.shape, jnp.float32), *zero_gradients(inputs))
    grads = accumulate_gradients(zeros, inputs, saved)
    dquery_BnHK = grads.query_BnGJK.reshape(query_BnHK.shape).astype(query_BnHK.dtype)
    dkey_BmGK, dvalue_BmGV = grads.key_BmGK.astype(key_BmGK.dtype), grads.value_BmGV.astype(value_BmGV.dtype)
    return dquery_BnHK, dkey_BmGK, dvalue_BmGV, sink_gradient(sink_H, saved), None, None


tiled.defvjp(_forward, _backward)


def _inputs(
    query_BnHK: jax.Array,
    key_BmGK: jax.Array,
    value_BmGV: jax.Array,
    pairs_P2: Pairs,
    masks: Masks,
    tile: int,
    window: int | None,
    scale: float,
) -> TileInputs:
    # without it JAX would find the masks equal in all blocks, and compute those of all tiles before the scan over these
    table_P2, masks, query_BnHK = jax.lax.optimization_barrier((jnp.asarray(pairs_P2), masks, query_BnHK))
    query_BnGJK = by_group(query_BnHK, key_BmGK)
    return TileInputs(query_BnGJK, key_BmGK, value_BmGV, table_P2, *masks, tile, window, scale)
