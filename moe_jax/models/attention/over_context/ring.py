"""Ring attention over context ranks (Liu et al. 2023): keys and values travel around a ring, one hop after another.

While the tiles of a hop are computed, the keys and values of the next hop travel, or the latents that they are computed
from. The backward pass is a ring of its own: keys and values travel again, and the sums of their gradients follow one
hop later, so no keys of other ranks are stored between the passes. Hops that no rank needs, because the window is
short, are left out.

B sequences, n tokens of this rank in each; G heads of keys and values, J of queries for each, H = G·J; K width of
queries and keys, V width of values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
    no_logits,
    outputs,
    sink_gradient,
    with_largest,
    zero_gradients,
)
from moe_jax.models.attention.tiles import Hop, ring_of
from moe_jax.parallel.context import context_ranks, own_positions, positions_of, ring_permute, shard_of
from moe_jax.parallel.mesh import Axis

_PAIRS_TO_HALVE = 4

Pair = tuple[jax.Array, jax.Array]  # keys [B, n, G, K] and values [B, n, G, V], or what both are computed from
Make = Callable[[Any, Pair], Pair]
Residuals = tuple[jax.Array, Pair, Any, jax.Array | None, jax.Array | None, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
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

    `make(weights, kv)` computes keys and values from what travels; None: `kv` holds them. `document_BN` has the
    document of each token of all ranks, in the order of the sequence; None: all are of one.
    """
    return _forward(query_BnHK, kv, weights, sink_H, document_BN, make, window, scale)[0]


def _forward(
    query_BnHK: jax.Array,
    kv: Pair,
    weights: Any,
    sink_H: jax.Array | None,
    document_BN: jax.Array | None,
    make: Make | None,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Residuals]:
    own, own_kv = query_BnHK.shape[1], kv
    key, value = _make_kv(make, weights, kv)
    query = by_group(query_BnHK, key)
    sums = initial_sums(query, value.shape[-1], sink_H)
    tile, hops = ring_of(context_ranks(), own, window, tiles.TILE)
    for hop, next_hop in zip(hops, (*hops[1:], None), strict=True):
        if next_hop is not None:
            # without it all hops could run at once, and stay in memory
            kv, sums = jax.lax.optimization_barrier((kv, sums))
            kv = _shift(kv, next_hop.distance - hop.distance)
        sums = accumulate(sums, _hop_inputs(hop, query, (key, value), document_BN, tile, window, scale))
        if next_hop is not None:
            key, value = _make_kv(make, weights, kv)
    out_BnHV, log_sum_BGJn = outputs(sums, value.dtype)
    return out_BnHV, (query_BnHK, own_kv, weights, sink_H, document_BN, out_BnHV, log_sum_BGJn)


def _backward(
    make: Make | None, window: int | None, scale: float, residuals: Residuals, dout_BnHV: jax.Array
) -> tuple[jax.Array, Pair, Any, jax.Array | None, None]:
    query_BnHK, own_kv, weights, sink_H, document_BN, out_BnHV, log_sum_BGJn = residuals
    own = query_BnHK.shape[1]
    own_keys, pull_own = _pullback(make, weights, own_kv)
    query, dout, out = (by_group(x, own_keys[0]) for x in (query_BnHK, dout_BnHV, out_BnHV))
    saved = backward_inputs(dout, out, log_sum_BGJn)
    tile, (first, *others) = ring_of(context_ranks(), own, window, tiles.TILE)
    # in reverse order: XLA would merge hops with equal ones of the forward pass, and store their results until now
    others.reverse()

    def gradients(dquery: jax.Array, hop: Hop, keys: Pair, dkeys: Pair | None = None) -> tuple[jax.Array, Pair]:
        """Add the gradients of a hop to those of the queries, and to those of these keys and values so far."""
        inputs = _hop_inputs(hop, query, keys, document_BN, tile, window, scale)
        total = accumulate_gradients(Gradients(dquery, *(dkeys or zero_gradients(inputs))), inputs, saved)
        return total.query_BnGJK, (total.key_BmGK, total.value_BmGV)

    # Own keys are split over both ends, so that computation overlaps with the first keys and with the last sums.
    first_half, last_half = _halves(first)
    kv = own_kv
    if others:
        kv = _shift(kv, others[0].distance)
    dquery = jnp.zeros(query.shape, jnp.float32)
    dquery, first_half_dkeys = gradients(dquery, first_half, own_keys)
    travelling: Pair | None = None
    weight_grads, distance = [], 0  # of the previous hop
    for hop, next_hop in zip(others, (*others[1:], None), strict=True) if others else ():
        keys, pull = _pullback(make, weights, kv)
        if next_hop is not None:
            kv, dquery = jax.lax.optimization_barrier((kv, dquery))
            kv = _shift(kv, next_hop.distance - hop.distance)
        # also in two halves, because GPUs run one transfer at a time: keys overlap with the first, sums with the last
        begin, end = _halves(hop)
        dquery, dkeys = gradients(dquery, begin, keys)
        if travelling is not None:
            travelling, dquery = jax.lax.optimization_barrier((travelling, dquery))
            travelling = _shift(travelling, hop.distance - distance)
        dquery, dkeys = gradients(dquery, end, keys, dkeys)
        dweights, dkv = pull(dkeys)
        weight_grads.append(dweights)
        travelling = dkv if travelling is None else _add(travelling, dkv)
        distance = hop.distance
    if travelling is not None:
        travelling = _shift(travelling, -distance)
    dquery, dkeys = gradients(dquery, last_half, own_keys, first_half_dkeys)
    dweights, dkv = pull_own(dkeys)
    dkv = dkv if travelling is None else _add(dkv, travelling)
    dweights = jax.tree.map(_sum, dweights, *weight_grads)
    dquery, dsink_H = dquery.reshape(query_BnHK.shape).astype(query_BnHK.dtype), sink_gradient(sink_H, saved)
    return dquery, (dkv[0].astype(own_kv[0].dtype), dkv[1].astype(own_kv[1].dtype)), dweights, dsink_H, None


values.defvjp(_forward, _backward)


def max_logits(
    query_BnHK: Float[Array, "B n H K"],
    sent: Any,
    keys_of: Callable[[Any], jax.Array],
    document_BN: Int[Array, "B N"] | None,
    window: int | None,
    scale: float,
) -> Float[Array, " H"]:
    """Return the largest logit of each head over this rank's queries and the keys of all ranks, without a gradient.

    `keys_of` computes keys from what travels. See `values`.
    """
    tile, hops = ring_of(context_ranks(), query_BnHK.shape[1], window, tiles.TILE)
    key = jax.lax.stop_gradient(keys_of(sent))
    query = by_group(query_BnHK, key)
    largest_GJ = no_logits(query)
    for hop, next_hop in zip(hops, (*hops[1:], None), strict=True):
        if next_hop is not None:
            sent, largest_GJ = jax.lax.optimization_barrier((sent, largest_GJ))
            sent = jax.tree.map(partial(ring_permute, distance=next_hop.distance - hop.distance), sent)
        largest_GJ = with_largest(largest_GJ, _hop_inputs(hop, query, (key, key), document_BN, tile, window, scale))
        if next_hop is not None:
            key = jax.lax.stop_gradient(keys_of(sent))
    return largest_GJ.reshape(-1)


def _make_kv(make: Make | None, weights: Any, kv: Pair) -> Pair:
    return kv if make is None else make(weights, kv)


def _pullback(make: Make | None, weights: Any, kv: Pair) -> tuple[Pair, Callable[[Pair], tuple[Any, Pair]]]:
    """Return keys and values, and the function from their gradients in float32 to those of `weights` and of `kv`.

    The gradients of `kv` are in float32, too.
    """
    if make is None:
        return kv, lambda dkeys: (weights, dkeys)  # without `make`, weights have no leaves
    keys, pull = jax.vjp(make, weights, kv)

    def backward(dkeys: Pair) -> tuple[Any, Pair]:
        dweights, dkv = pull((dkeys[0].astype(keys[0].dtype), dkeys[1].astype(keys[1].dtype)))
        return dweights, (dkv[0].astype(jnp.float32), dkv[1].astype(jnp.float32))

    return keys, backward


def _halves(hop: Hop) -> tuple[Hop, Hop]:
    """Split the pairs of tiles of a hop into two halves.

    A few pairs stay together: XLA unrolls loops of one iteration, and then needs more memory at once.
    """
    pairs = hop.pairs_CP2.shape[1]
    half = pairs // 2 if pairs >= _PAIRS_TO_HALVE else pairs
    return hop._replace(pairs_CP2=hop.pairs_CP2[:, :half]), hop._replace(pairs_CP2=hop.pairs_CP2[:, half:])


def _hop_inputs(
    hop: Hop,
    query_BnGJK: jax.Array,
    keys: Pair,
    document_BN: Int[Array, "B N"] | None,
    tile: int,
    window: int | None,
    scale: float,
) -> TileInputs:
    """Return what this rank computes in a hop."""
    rank, own, positions, documents = jax.lax.axis_index(Axis.CONTEXT), query_BnGJK.shape[1], None, None
    pairs_P2, other = jnp.asarray(hop.pairs_CP2)[rank], (rank - hop.distance) % context_ranks()
    if hop.masked:
        positions = own_positions(own), positions_of(other, own)
    if document_BN is not None:
        documents = shard_of(rank, document_BN), shard_of(other, document_BN)
    # without it JAX would find the masks equal in all blocks, and compute those of all tiles before the scan over these
    pairs_P2, positions, query_BnGJK = jax.lax.optimization_barrier((pairs_P2, positions, query_BnGJK))
    return TileInputs(query_BnGJK, *keys, pairs_P2, positions, documents, tile, window, scale)


def _shift(kv: Pair, distance: int) -> Pair:
    return ring_permute(kv[0], distance), ring_permute(kv[1], distance)


def _add(x: Pair, y: Pair) -> Pair:
    return x[0] + y[0], x[1] + y[1]


def _sum(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return a sum in the type of its terms, which is narrow if weights are (ZeRO 3), but added up in float32."""
    return sum((each.astype(jnp.float32) for each in others), start=x.astype(jnp.float32)).astype(x.dtype)
