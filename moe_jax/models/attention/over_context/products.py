"""The computation of one hop of ring attention: queries of this rank with the keys and values of one rank, in tiles.

The sums of a softmax are accumulated tile by tile, and gradients are computed from its log-sum-exp (Dao et al. 2022,
"FlashAttention", algorithms 1 and 4). No array has the lengths of two sequences. There are no collectives here.

B sequences, n tokens of this rank in each; G heads of keys and values, J of queries for each, H = G·J; K width of
queries and keys, V width of values. P pairs of tiles, of t queries and s = t keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.attention.core import causal_mask

_MASKED = float(jnp.finfo(jnp.float32).min) / 2


class HopInputs(NamedTuple):
    """This rank's queries, and the keys and values that they are multiplied with in one hop."""

    query_BnGJK: jax.Array
    key_BnGK: jax.Array
    value_BnGV: jax.Array
    pairs_P2: jax.Array  # indices of the tiles to compute: one of queries, one of keys
    positions: tuple[jax.Array, jax.Array] | None  # [n] of queries and [n] of keys; None: all keys are visible
    tile: int
    window: int | None
    scale: float


class SoftmaxSums(NamedTuple):
    """The sums of a softmax over the keys so far."""

    peak_BGJn: jax.Array  # the largest logit
    total_BGJn: jax.Array  # sum of exp(logit - peak)
    value_BnGJV: jax.Array  # sum of values weighted by these exponentials


class BackwardInputs(NamedTuple):
    """What the backward pass reads for each query."""

    dout_BnGJV: jax.Array  # gradients of the outputs
    log_sum_BGJn: jax.Array  # log-sum-exp of the logits of all keys
    mean_BGJn: jax.Array  # mean of the gradients of the softmax weights, by these weights


class Gradients(NamedTuple):
    """Gradients in float32, because they are sums over tiles and ranks."""

    query_BnGJK: jax.Array
    key_BnGK: jax.Array
    value_BnGV: jax.Array


def initial_sums(query_BnGJK: jax.Array, width: int, sink_H: Float[Array, " H"] | None) -> SoftmaxSums:
    """Return the sums over no keys, for values of this width. A sink is a logit without a value."""
    batch, own, groups, queries, _ = query_BnGJK.shape
    shape = (batch, groups, queries, own)
    value = jnp.zeros((batch, own, groups, queries, width), jnp.float32)
    if sink_H is None:
        return SoftmaxSums(jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), value)
    return SoftmaxSums(jnp.broadcast_to(group_sinks(sink_H, groups), shape), jnp.ones(shape, jnp.float32), value)


def group_sinks(sink_H: Float[Array, " H"], groups: int) -> Float[Array, "G J 1"]:
    """Return the sinks of query heads by groups, in float32."""
    return sink_H.astype(jnp.float32).reshape(groups, -1, 1)


def accumulate(sums: SoftmaxSums, hop: HopInputs) -> SoftmaxSums:
    """Add the keys and values of a hop to the sums."""

    def add(sums: SoftmaxSums, pair_2: jax.Array) -> tuple[SoftmaxSums, None]:
        start_t, start_s = hop.tile * pair_2
        query, key, value = _tiles(hop, start_t, start_s)
        logit = _logits(hop, query, key, start_t, start_s)
        peak_BGJt, total_BGJt = (_tile(x, start_t, hop.tile, 3) for x in (sums.peak_BGJn, sums.total_BGJn))
        new_peak_BGJt = jnp.maximum(peak_BGJt, logit.max(axis=-1))
        exp = jnp.exp(logit - new_peak_BGJt[..., None])
        rescale_BGJt = jnp.exp(peak_BGJt - new_peak_BGJt)  # factor for the earlier sums
        value_BtGJV = jnp.moveaxis(rescale_BGJt, 3, 1)[..., None] * _tile(sums.value_BnGJV, start_t, hop.tile, 1)
        value_BtGJV += _product("bgjts,bsgv->btgjv", exp, value)
        return SoftmaxSums(
            _put(sums.peak_BGJn, new_peak_BGJt, start_t, 3),
            _put(sums.total_BGJn, rescale_BGJt * total_BGJt + exp.sum(axis=-1), start_t, 3),
            _put(sums.value_BnGJV, value_BtGJV, start_t, 1),
        ), None

    return jax.lax.scan(add, sums, hop.pairs_P2)[0]


def zero_gradients(hop: HopInputs) -> tuple[jax.Array, jax.Array]:
    """Return zero gradients for keys and values."""
    return jnp.zeros(hop.key_BnGK.shape, jnp.float32), jnp.zeros(hop.value_BnGV.shape, jnp.float32)


def accumulate_gradients(grads: Gradients, hop: HopInputs, saved: BackwardInputs) -> Gradients:
    """Add the gradients of a hop."""

    def add(grads: Gradients, pair_2: jax.Array) -> tuple[Gradients, None]:
        start_t, start_s = hop.tile * pair_2
        query, key, value = _tiles(hop, start_t, start_s)
        dout_BtGJV = _tile(saved.dout_BnGJV, start_t, hop.tile, 1)
        log_sum_BGJt, mean_BGJt = (_tile(x, start_t, hop.tile, 3) for x in (saved.log_sum_BGJn, saved.mean_BGJn))
        weight = jnp.exp(_logits(hop, query, key, start_t, start_s) - log_sum_BGJt[..., None])
        dweight = _product("btgjv,bsgv->bgjts", dout_BtGJV, value)
        dlogit = hop.scale * weight * (dweight - mean_BGJt[..., None])
        dquery = _product("bgjts,bsgk->btgjk", dlogit, key)
        dkey = _product("bgjts,btgjk->bsgk", dlogit, query)
        dvalue = _product("bgjts,btgjv->bsgv", weight, dout_BtGJV)
        return Gradients(
            _add(grads.query_BnGJK, dquery, start_t),
            _add(grads.key_BnGK, dkey, start_s),
            _add(grads.value_BnGV, dvalue, start_s),
        ), None

    return jax.lax.scan(add, grads, hop.pairs_P2)[0]


def _tiles(hop: HopInputs, start_t: Int[Array, ""], start_s: Int[Array, ""]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the queries, keys and values of a pair of tiles."""
    key, value = (_tile(x, start_s, hop.tile, 1) for x in (hop.key_BnGK, hop.value_BnGV))
    return _tile(hop.query_BnGJK, start_t, hop.tile, 1), key, value


def _logits(
    hop: HopInputs, query_BtGJK: jax.Array, key_BsGK: jax.Array, start_t: jax.Array, start_s: jax.Array
) -> Float[Array, "B G J t s"]:
    """Return the masked logits of a pair of tiles."""
    logit = hop.scale * _product("btgjk,bsgk->bgjts", query_BtGJK, key_BsGK)
    if hop.positions is None:
        return logit
    starts = zip(hop.positions, (start_t, start_s), strict=True)
    position_t, position_s = (_tile(x, start, hop.tile, 0) for x, start in starts)
    return jnp.where(causal_mask(position_t, position_s, hop.window), logit, _MASKED)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute an einsum in float32, with operands in the dtype of `y`."""
    return jnp.einsum(equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _tile(x: jax.Array, start: jax.Array, tile: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, tile, dim)


def _put(x: jax.Array, part: jax.Array, start: jax.Array, dim: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)


def _add(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return _put(x, _tile(x, start, part.shape[1], 1) + part, start, 1)
