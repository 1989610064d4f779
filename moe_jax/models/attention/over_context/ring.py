"""Attention over context ranks: keys and values go around a ring, and each hop's are computed with as they come.

Ring attention (Liu et al. 2023). While a hop's tiles are computed the keys and values of the next hop travel. The
backward pass is a ring of its own: keys and values travel again, and behind them, one hop late, the sums of their
gradients; so nothing is kept of other ranks' keys. Hops that nobody needs, as windows are short, are left out.

B sequences, n tokens of each that are this rank's; G heads of keys and values, J of queries for each, H = G·J; K width
of queries and keys, V of values.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.over_context.products import (
    Seen,
    Square,
    absorbed,
    no_sums,
    of_groups,
    with_gradients,
)
from moe_jax.models.attention.over_context.tiles import Hop, ring_of
from moe_jax.parallel.context import context_ranks, own_positions, passed_on, positions_of
from moe_jax.parallel.mesh import Axis

TILE = 512  # tokens: few enough for fast memory, many enough for a matrix unit

Held = tuple[jax.Array, jax.Array]  # keys [B, n, G, K] and values [B, n, G, V], or their gradients
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def values(
    query_BnHK: Float[Array, "B n H K"],
    key_BnGK: Float[Array, "B n G K"],
    value_BnGV: Float[Array, "B n G V"],
    sink_H: Float[Array, " H"] | None,
    window: int | None,
    scale: float,
) -> Float[Array, "B n H V"]:
    """The values that this rank's queries see."""
    return _forward(query_BnHK, key_BnGK, value_BnGV, sink_H, window, scale)[0]


def _forward(
    query_BnHK: jax.Array,
    key_BnGK: jax.Array,
    value_BnGV: jax.Array,
    sink_H: jax.Array | None,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Residuals]:
    own = query_BnHK.shape[1]
    query = _by_group(query_BnHK, key_BnGK)
    sums = no_sums(query, value_BnGV.shape[-1], sink_H)
    tile, hops = ring_of(context_ranks(), own, window, TILE)
    held = (key_BnGK, value_BnGV)
    for hop, following in zip(hops, (*hops[1:], None), strict=True):
        now = held
        if following is not None:
            held = _passed_on(held, following.distance - hop.distance)
        sums = absorbed(sums, Square(query, *now, *_of_rank(hop, own), tile, window, scale))
    out = sums.value_BnGJV / jnp.moveaxis(sums.total_BGJn, 3, 1)[..., None]
    out_BnHV = out.reshape(*query_BnHK.shape[:3], -1).astype(value_BnGV.dtype)
    log_sum_BGJn = sums.peak_BGJn + jnp.log(sums.total_BGJn)
    return out_BnHV, (query_BnHK, key_BnGK, value_BnGV, sink_H, out_BnHV, log_sum_BGJn)


def _backward(
    window: int | None, scale: float, kept: Residuals, dout_BnHV: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    query_BnHK, key_BnGK, value_BnGV, sink_H, out_BnHV, log_sum_BGJn = kept
    own, groups = key_BnGK.shape[1:3]
    query, dout = (_by_group(x, key_BnGK) for x in (query_BnHK, dout_BnHV))
    mean_BnGJ = jnp.sum(dout.astype(jnp.float32) * _by_group(out_BnHV, key_BnGK).astype(jnp.float32), axis=-1)
    seen = Seen(dout, log_sum_BGJn, jnp.moveaxis(mean_BnGJ, 1, 3))
    tile, (first, *others) = ring_of(context_ranks(), own, window, TILE)
    # the other way around: XLA would merge hops that are those of the forward pass, and keep what they brought till now
    others.reverse()

    def gradients(dquery: jax.Array, hop: Hop, held: Held) -> tuple[jax.Array, Held]:
        """Of the queries so far, and of a hop's keys and values."""
        square = Square(query, *held, *_of_rank(hop, own), tile, window, scale)
        dquery, *dheld = with_gradients(dquery, square, seen)
        return dquery, (dheld[0], dheld[1])

    # Own keys come at both ends: there is something to compute while the first keys travel, and while the last sums do.
    own_held = held = (key_BnGK, value_BnGV)
    half = first.pairs_CP2.shape[1] // 2
    distance = 0  # that keys have travelled
    if others:
        held = _passed_on(held, others[0].distance)
    dquery = jnp.zeros(query.shape, jnp.float32)
    dquery, home = gradients(dquery, first._replace(pairs_CP2=first.pairs_CP2[:, :half]), own_held)
    travelling: Held | None = None
    for hop, following in zip(others, (*others[1:], None), strict=True) if others else ():
        now = held
        if following is not None:
            held = _passed_on(held, following.distance - hop.distance)
        if travelling is not None:
            travelling = _passed_on(travelling, hop.distance - distance)
        dquery, dheld = gradients(dquery, hop, now)
        travelling = dheld if travelling is None else _sum(travelling, dheld)
        distance = hop.distance
    if travelling is not None:
        travelling = _passed_on(travelling, -distance)
    dquery, dheld = gradients(dquery, first._replace(pairs_CP2=first.pairs_CP2[:, half:]), own_held)
    home = _sum(home, dheld)
    dkey, dvalue = home if travelling is None else _sum(home, travelling)
    dsink_H = None
    if sink_H is not None:
        share_BGJn = jnp.exp(of_groups(sink_H, groups) - log_sum_BGJn)
        dsink_H = -jnp.sum(share_BGJn * seen.mean_BGJn, axis=(0, 3)).reshape(-1).astype(sink_H.dtype)
    dquery = dquery.reshape(query_BnHK.shape).astype(query_BnHK.dtype)
    return dquery, dkey.astype(key_BnGK.dtype), dvalue.astype(value_BnGV.dtype), dsink_H


values.defvjp(_forward, _backward)


def _of_rank(hop: Hop, own: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """What this rank computes in a hop: pairs, and the positions of `own` queries and keys, if some are not seen."""
    rank = jax.lax.axis_index(Axis.CONTEXT)
    pairs_P2 = jnp.asarray(hop.pairs_CP2)[rank]
    if not hop.masked:
        return pairs_P2, None
    return pairs_P2, (own_positions(own), positions_of((rank - hop.distance) % context_ranks(), own))


def _by_group(x_BnHV: Float[Array, "B n H V"], key_BnGK: Float[Array, "B n G K"]) -> Float[Array, "B n G J V"]:
    """Query heads by the head of keys that they see."""
    return x_BnHV.reshape(*key_BnGK.shape[:3], -1, x_BnHV.shape[-1])


def _passed_on(held: Held, distance: int) -> Held:
    return passed_on(held[0], distance), passed_on(held[1], distance)


def _sum(x: Held, y: Held) -> Held:
    return x[0] + y[0], x[1] + y[1]
