"""What a rank computes with the keys and values that it holds in a hop, tile by tile; no collectives.

Sums of a softmax that are put together tile by tile, and their gradients from its log-sum-exp (Dao et al. 2022,
"FlashAttention", algorithms 1 and 4). Nothing of two sequences' lengths is in memory.

B sequences, n tokens of each that are this rank's; G heads of keys and values, J of queries for each, H = G·J; K width
of queries and keys, V of values. P pairs of tiles, of t queries and s = t keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.attention.core import seen_before

_UNSEEN = float(jnp.finfo(jnp.float32).min) / 2


class Square(NamedTuple):
    """Own queries, and the keys and values that they meet."""

    query_BnGJK: jax.Array
    key_BnGK: jax.Array
    value_BnGV: jax.Array
    pairs_P2: jax.Array  # numbers of the tiles that are computed, of queries and of keys
    positions: tuple[jax.Array, jax.Array] | None  # [n] of queries and [n] of keys; None: queries see all keys
    tile: int
    window: int | None
    scale: float


class SoftmaxSums(NamedTuple):
    """What a softmax is made of, over the keys so far."""

    peak_BGJn: jax.Array  # the largest logit
    total_BGJn: jax.Array  # of exponentials, less the peak
    value_BnGJV: jax.Array  # values weighted with them


class VisibleKeys(NamedTuple):
    """What became of queries, for their backward pass."""

    dout_BnGJV: jax.Array  # gradients of the values that they saw
    log_sum_BGJn: jax.Array  # of exponentials over all keys
    mean_BGJn: jax.Array  # of the gradients of their weights, by these weights


class Gradients(NamedTuple):
    """In float32, as they are sums over tiles and ranks."""

    query_BnGJK: jax.Array
    key_BnGK: jax.Array
    value_BnGV: jax.Array


def no_sums(query_BnGJK: jax.Array, width: int, sink_H: Float[Array, " H"] | None) -> SoftmaxSums:
    """Of no key, for values of this width; a sink is a logit without a value."""
    batch, own, groups, queries, _ = query_BnGJK.shape
    shape = (batch, groups, queries, own)
    value = jnp.zeros((batch, own, groups, queries, width), jnp.float32)
    if sink_H is None:
        return SoftmaxSums(jnp.full(shape, _UNSEEN, jnp.float32), jnp.zeros(shape, jnp.float32), value)
    return SoftmaxSums(jnp.broadcast_to(of_groups(sink_H, groups), shape), jnp.ones(shape, jnp.float32), value)


def of_groups(sink_H: Float[Array, " H"], groups: int) -> Float[Array, "G J 1"]:
    """Of each query head, in float32."""
    return sink_H.astype(jnp.float32).reshape(groups, -1, 1)


def absorbed(sums: SoftmaxSums, square: Square) -> SoftmaxSums:
    """The sums with those of a square."""

    def add(sums: SoftmaxSums, pair_2: jax.Array) -> tuple[SoftmaxSums, None]:
        start_t, start_s = square.tile * pair_2
        query, key, value = _tiles(square, start_t, start_s)
        logit = _logits(square, query, key, start_t, start_s)
        peak_BGJt, total_BGJt = (_tile(x, start_t, square.tile, 3) for x in (sums.peak_BGJn, sums.total_BGJn))
        new_BGJt = jnp.maximum(peak_BGJt, logit.max(axis=-1))
        share = jnp.exp(logit - new_BGJt[..., None])
        less_BGJt = jnp.exp(peak_BGJt - new_BGJt)  # of what was summed before
        value_BtGJV = jnp.moveaxis(less_BGJt, 3, 1)[..., None] * _tile(sums.value_BnGJV, start_t, square.tile, 1)
        value_BtGJV += _product("bgjts,bsgv->btgjv", share, value)
        return SoftmaxSums(
            _put(sums.peak_BGJn, new_BGJt, start_t, 3),
            _put(sums.total_BGJn, less_BGJt * total_BGJt + share.sum(axis=-1), start_t, 3),
            _put(sums.value_BnGJV, value_BtGJV, start_t, 1),
        ), None

    return jax.lax.scan(add, sums, square.pairs_P2)[0]


def no_gradients(square: Square) -> tuple[jax.Array, jax.Array]:
    """Of keys and values that no query has met."""
    return jnp.zeros(square.key_BnGK.shape, jnp.float32), jnp.zeros(square.value_BnGV.shape, jnp.float32)


def with_gradients(grads: Gradients, square: Square, seen: VisibleKeys) -> Gradients:
    """With those of a square."""

    def add(grads: Gradients, pair_2: jax.Array) -> tuple[Gradients, None]:
        start_t, start_s = square.tile * pair_2
        query, key, value = _tiles(square, start_t, start_s)
        dout_BtGJV = _tile(seen.dout_BnGJV, start_t, square.tile, 1)
        log_sum_BGJt, mean_BGJt = (_tile(x, start_t, square.tile, 3) for x in (seen.log_sum_BGJn, seen.mean_BGJn))
        share = jnp.exp(_logits(square, query, key, start_t, start_s) - log_sum_BGJt[..., None])
        dshare = _product("btgjv,bsgv->bgjts", dout_BtGJV, value)
        dlogit = square.scale * share * (dshare - mean_BGJt[..., None])
        dquery = _product("bgjts,bsgk->btgjk", dlogit, key)
        dkey = _product("bgjts,btgjk->bsgk", dlogit, query)
        dvalue = _product("bgjts,btgjv->bsgv", share, dout_BtGJV)
        return Gradients(
            _add(grads.query_BnGJK, dquery, start_t),
            _add(grads.key_BnGK, dkey, start_s),
            _add(grads.value_BnGV, dvalue, start_s),
        ), None

    return jax.lax.scan(add, grads, square.pairs_P2)[0]


def _tiles(square: Square, start_t: Int[Array, ""], start_s: Int[Array, ""]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of a pair."""
    key, value = (_tile(x, start_s, square.tile, 1) for x in (square.key_BnGK, square.value_BnGV))
    return _tile(square.query_BnGJK, start_t, square.tile, 1), key, value


def _logits(
    square: Square, query_BtGJK: jax.Array, key_BsGK: jax.Array, start_t: jax.Array, start_s: jax.Array
) -> Float[Array, "B G J t s"]:
    """Of a pair's queries for its keys."""
    logit = square.scale * _product("btgjk,bsgk->bgjts", query_BtGJK, key_BsGK)
    if square.positions is None:
        return logit
    starts = zip(square.positions, (start_t, start_s), strict=True)
    position_t, position_s = (_tile(x, start, square.tile, 0) for x, start in starts)
    return jnp.where(seen_before(position_t, position_s, square.window), logit, _UNSEEN)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """In float32, of factors in the type of the second one."""
    return jnp.einsum(equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _tile(x: jax.Array, start: jax.Array, tile: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, tile, dim)


def _put(x: jax.Array, part: jax.Array, start: jax.Array, dim: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)


def _add(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return _put(x, _tile(x, start, part.shape[1], 1) + part, start, 1)
