"""Attention over context ranks: keys and values go around a ring, and each hop's are computed with as they come.

Ring attention (Liu et al. 2023). While a hop's tiles are computed the keys and values of the next hop travel, or what
they are made of. The backward pass is a ring of its own: keys and values travel again, and behind them, one hop late,
the sums of their gradients; so nothing is kept of other ranks' keys. Hops that nobody needs, as windows are short, are
left out.

B sequences, n tokens of each that are this rank's; G heads of keys and values, J of queries for each, H = G·J; K width
of queries and keys, V of values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.over_context.products import (
    Gradients,
    Square,
    VisibleKeys,
    absorbed,
    no_gradients,
    no_sums,
    of_groups,
    with_gradients,
)
from moe_jax.models.attention.over_context.tiles import Hop, ring_of
from moe_jax.parallel.context import context_ranks, own_positions, positions_of, ring_permute
from moe_jax.parallel.mesh import Axis

_PAIRS_TO_HALVE = 4
TILE = 512  # tokens: few enough for fast memory, many enough for a matrix unit

Pair = tuple[jax.Array, jax.Array]  # keys [B, n, G, K] and values [B, n, G, V], or what both are made of
Make = Callable[[Any, Pair], Pair]
Residuals = tuple[jax.Array, Pair, Any, jax.Array | None, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def values(
    query_BnHK: Float[Array, "B n H K"],
    held: Pair,
    weights: Any,
    sink_H: Float[Array, " H"] | None,
    make: Make | None,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """The values that this rank's queries see.

    `make(weights, held)` gives keys and values of what travels; None: they are it.
    """
    return _forward(query_BnHK, held, weights, sink_H, make, window, scale)[0]


def _forward(
    query_BnHK: jax.Array,
    held: Pair,
    weights: Any,
    sink_H: jax.Array | None,
    make: Make | None,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Residuals]:
    own, own_held = query_BnHK.shape[1], held
    key, value = _made(make, weights, held)
    query = _by_group(query_BnHK, key)
    sums = no_sums(query, value.shape[-1], sink_H)
    tile, hops = ring_of(context_ranks(), own, window, TILE)
    for hop, following in zip(hops, (*hops[1:], None), strict=True):
        if following is not None:
            held, sums = jax.lax.optimization_barrier((held, sums))  # else all hops could be taken at once, and kept
            held = _passed_on(held, following.distance - hop.distance)
        sums = absorbed(sums, _square(hop, query, (key, value), tile, window, scale))
        if following is not None:
            key, value = _made(make, weights, held)
    out = sums.value_BnGJV / jnp.moveaxis(sums.total_BGJn, 3, 1)[..., None]
    out_BnHV = out.reshape(*query_BnHK.shape[:3], -1).astype(value.dtype)
    log_sum_BGJn = sums.peak_BGJn + jnp.log(sums.total_BGJn)
    return out_BnHV, (query_BnHK, own_held, weights, sink_H, out_BnHV, log_sum_BGJn)


def _backward(
    make: Make | None, window: int | None, scale: float, kept: Residuals, dout_BnHV: jax.Array
) -> tuple[jax.Array, Pair, Any, jax.Array | None]:
    query_BnHK, own_held, weights, sink_H, out_BnHV, log_sum_BGJn = kept
    own = query_BnHK.shape[1]
    own_keys, pull_own = _pullback(make, weights, own_held)
    query, dout, out = (_by_group(x, own_keys[0]) for x in (query_BnHK, dout_BnHV, out_BnHV))
    mean_BnGJ = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    seen = VisibleKeys(dout, log_sum_BGJn, jnp.moveaxis(mean_BnGJ, 1, 3))
    tile, (first, *others) = ring_of(context_ranks(), own, window, TILE)
    # the other way around: XLA would merge hops that are those of the forward pass, and keep what they brought till now
    others.reverse()

    def gradients(dquery: jax.Array, hop: Hop, keys: Pair, dkeys: Pair | None = None) -> tuple[jax.Array, Pair]:
        """Of the queries and these keys and values so far, with those of a hop."""
        square = _square(hop, query, keys, tile, window, scale)
        found = with_gradients(Gradients(dquery, *(dkeys or no_gradients(square))), square, seen)
        return found.query_BnGJK, (found.key_BnGK, found.value_BnGV)

    # Own keys come at both ends: there is something to compute while the first keys travel, and while the last sums do.
    first_half, last_half = _halves(first)
    held = own_held
    if others:
        held = _passed_on(held, others[0].distance)
    dquery = jnp.zeros(query.shape, jnp.float32)
    dquery, begun = gradients(dquery, first_half, own_keys)
    travelling: Pair | None = None
    of_weights, distance = [], 0  # that keys have travelled
    for hop, following in zip(others, (*others[1:], None), strict=True) if others else ():
        keys, pull = _pullback(make, weights, held)
        if following is not None:
            held, dquery = jax.lax.optimization_barrier((held, dquery))
            held = _passed_on(held, following.distance - hop.distance)
        # also in two halves, for GPUs transfer one thing at a time: keys beside the first, sums beside the last
        begin, end = _halves(hop)
        dquery, dkeys = gradients(dquery, begin, keys)
        if travelling is not None:
            travelling, dquery = jax.lax.optimization_barrier((travelling, dquery))
            travelling = _passed_on(travelling, hop.distance - distance)
        dquery, dkeys = gradients(dquery, end, keys, dkeys)
        dweights, dheld = pull(dkeys)
        of_weights.append(dweights)
        travelling = dheld if travelling is None else _sum(travelling, dheld)
        distance = hop.distance
    if travelling is not None:
        travelling = _passed_on(travelling, -distance)
    dquery, dkeys = gradients(dquery, last_half, own_keys, begun)
    dweights, dheld = pull_own(dkeys)
    dheld = dheld if travelling is None else _sum(dheld, travelling)
    dweights = jax.tree.map(lambda *parts: sum(parts), dweights, *of_weights)
    dsink_H = None
    if sink_H is not None:
        share_BGJn = jnp.exp(of_groups(sink_H, own_keys[0].shape[2]) - log_sum_BGJn)
        dsink_H = -jnp.sum(share_BGJn * seen.mean_BGJn, axis=(0, 3)).reshape(-1).astype(sink_H.dtype)
    dquery = dquery.reshape(query_BnHK.shape).astype(query_BnHK.dtype)
    return dquery, (dheld[0].astype(own_held[0].dtype), dheld[1].astype(own_held[1].dtype)), dweights, dsink_H


values.defvjp(_forward, _backward)


def _made(make: Make | None, weights: Any, held: Pair) -> Pair:
    return held if make is None else make(weights, held)


def _pullback(make: Make | None, weights: Any, held: Pair) -> tuple[Pair, Callable[[Pair], tuple[Any, Pair]]]:
    """Keys and values; from their gradients in float32 those of the weights, and of what is held in float32."""
    if make is None:
        return held, lambda dkeys: (weights, dkeys)  # it has no leaves
    keys, pull = jax.vjp(make, weights, held)

    def pulled(dkeys: Pair) -> tuple[Any, Pair]:
        dweights, dheld = pull((dkeys[0].astype(keys[0].dtype), dkeys[1].astype(keys[1].dtype)))
        return dweights, (dheld[0].astype(jnp.float32), dheld[1].astype(jnp.float32))

    return keys, pulled


def _halves(hop: Hop) -> tuple[Hop, Hop]:
    """The pairs of tiles of a hop, in two; few stay together: XLA unrolls loops of one turn, and keeps more at once."""
    pairs = hop.pairs_CP2.shape[1]
    half = pairs // 2 if pairs >= _PAIRS_TO_HALVE else pairs
    return hop._replace(pairs_CP2=hop.pairs_CP2[:, :half]), hop._replace(pairs_CP2=hop.pairs_CP2[:, half:])


def _square(hop: Hop, query_BnGJK: jax.Array, keys: Pair, tile: int, window: int | None, scale: float) -> Square:
    """What this rank computes in a hop."""
    rank, own, positions = jax.lax.axis_index(Axis.CONTEXT), query_BnGJK.shape[1], None
    pairs_P2 = jnp.asarray(hop.pairs_CP2)[rank]
    if hop.masked:
        positions = own_positions(own), positions_of((rank - hop.distance) % context_ranks(), own)
    # else JAX would find that masks are the same in all blocks, and make those of all tiles in front of a scan of these
    pairs_P2, positions, query_BnGJK = jax.lax.optimization_barrier((pairs_P2, positions, query_BnGJK))
    return Square(query_BnGJK, *keys, pairs_P2, positions, tile, window, scale)


def _by_group(x_BnHV: Float[Array, "B n H V"], key_BnGK: Float[Array, "B n G K"]) -> Float[Array, "B n G J V"]:
    """Query heads by the head of keys that they see."""
    return x_BnHV.reshape(*key_BnGK.shape[:3], -1, x_BnHV.shape[-1])


def _passed_on(held: Pair, distance: int) -> Pair:
    return ring_permute(held[0], distance), ring_permute(held[1], distance)


def _sum(x: Pair, y: Pair) -> Pair:
    return x[0] + y[0], x[1] + y[1]
