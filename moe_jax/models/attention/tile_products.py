"""Attention of some queries to some keys in tiles: the sums of a softmax, and the gradients from its log-sum-exp.

The sums of a softmax are accumulated tile by tile (Dao et al. 2022, "FlashAttention", algorithms 1 and 4). No array has
the lengths of two sequences. A ring calls these functions once for each hop, `tiled` once for all keys. There are no
collectives here.

B sequences, n queries and m keys of each; G heads of keys and values, J of queries for each, H = G·J; K width of
queries and keys, V width of values. P pairs of tiles, of t queries and s = t keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.models.attention.core import causal_mask, same_document

_MASKED = float(jnp.finfo(jnp.float32).min) / 2


class TileInputs(NamedTuple):
    """Queries, and the keys and values that they are multiplied with."""

    query_BnGJK: jax.Array
    key_BmGK: jax.Array
    value_BmGV: jax.Array
    pairs_P2: jax.Array  # indices of the tiles to compute: one of queries, one of keys
    positions: tuple[jax.Array, jax.Array] | None  # [n] of queries and [m] of keys; None: no key is masked by its age
    documents: tuple[jax.Array, jax.Array] | None  # [B, n] of queries and [B, m] of keys; None: all are of one document
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
    key_BmGK: jax.Array
    value_BmGV: jax.Array


def initial_sums(query_BnGJK: jax.Array, width: int, sink_H: Float[Array, " H"] | None) -> SoftmaxSums:
    """Return the sums over no keys, for values of this width. A sink is a logit without a value."""
    batch, own, groups, queries, _ = query_BnGJK.shape
    shape = (batch, groups, queries, own)
    value = jnp.zeros((batch, own, groups, queries, width), jnp.float32)
    if sink_H is None:
        return SoftmaxSums(jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), value)
    return SoftmaxSums(jnp.broadcast_to(_group_sinks(sink_H, groups), shape), jnp.ones(shape, jnp.float32), value)


def _group_sinks(sink_H: Float[Array, " H"], groups: int) -> Float[Array, "G J 1"]:
    """Return the sinks of query heads by groups, in float32."""
    return sink_H.astype(jnp.float32).reshape(groups, -1, 1)


def accumulate(sums: SoftmaxSums, inputs: TileInputs) -> SoftmaxSums:
    """Add the keys and values of all pairs of tiles to the sums."""

    def add(sums: SoftmaxSums, pair_2: jax.Array) -> tuple[SoftmaxSums, None]:
        start_t, start_s = inputs.tile * pair_2
        query, key, value = _tiles(inputs, start_t, start_s)
        logit = _logits(inputs, query, key, start_t, start_s)
        peak_BGJt, total_BGJt = (_tile(x, start_t, inputs.tile, 3) for x in (sums.peak_BGJn, sums.total_BGJn))
        new_peak_BGJt = jnp.maximum(peak_BGJt, logit.max(axis=-1))
        exp = jnp.exp(logit - new_peak_BGJt[..., None])
        rescale_BGJt = jnp.exp(peak_BGJt - new_peak_BGJt)  # factor for the earlier sums
        value_BtGJV = jnp.moveaxis(rescale_BGJt, 3, 1)[..., None] * _tile(sums.value_BnGJV, start_t, inputs.tile, 1)
        value_BtGJV += _product("bgjts,bsgv->btgjv", exp, value)
        return SoftmaxSums(
            _put(sums.peak_BGJn, new_peak_BGJt, start_t, 3),
            _put(sums.total_BGJn, rescale_BGJt * total_BGJt + exp.sum(axis=-1), start_t, 3),
            _put(sums.value_BnGJV, value_BtGJV, start_t, 1),
        ), None

    return jax.lax.scan(add, sums, inputs.pairs_P2)[0]


def no_logits(query_BnGJK: jax.Array) -> Float[Array, "G J"]:
    """Return the largest logit of each head over no keys: less than any logit."""
    return jnp.full(query_BnGJK.shape[2:4], _MASKED, jnp.float32)


def with_largest(largest_GJ: Float[Array, "G J"], inputs: TileInputs) -> Float[Array, "G J"]:
    """Return the largest logit of each head, over these keys and the logits so far.

    Queries whose document has a negative number, which are padding, do not count.
    """

    def larger(largest_GJ: jax.Array, pair_2: jax.Array) -> tuple[jax.Array, None]:
        start_t, start_s = inputs.tile * pair_2
        query, key, _ = _tiles(inputs, start_t, start_s)
        logit = _logits(inputs, query, key, start_t, start_s)
        if inputs.documents is not None:
            document_Bt = _tile(inputs.documents[0], start_t, inputs.tile, 1)
            logit = jnp.where((document_Bt >= 0)[:, None, None, :, None], logit, _MASKED)
        return jnp.maximum(largest_GJ, logit.max(axis=(0, 3, 4))), None

    return jax.lax.scan(larger, largest_GJ, inputs.pairs_P2)[0]


def outputs(sums: SoftmaxSums, dtype: DTypeLike) -> tuple[Float[Array, "B n H V"], Float[Array, "B G J n"]]:
    """Return the outputs of the heads, and the log-sum-exp of the logits."""
    value_BnGJV = sums.value_BnGJV / jnp.moveaxis(sums.total_BGJn, 3, 1)[..., None]
    out_BnHV = value_BnGJV.reshape(*value_BnGJV.shape[:2], -1, value_BnGJV.shape[-1]).astype(dtype)
    return out_BnHV, sums.peak_BGJn + jnp.log(sums.total_BGJn)


def by_group(x_BnHV: Float[Array, "B n H V"], key_BmGK: Float[Array, "B m G K"]) -> Float[Array, "B n G J V"]:
    """Group query heads by the head of keys that they attend to."""
    batch, tokens, _, width = x_BnHV.shape
    return x_BnHV.reshape(batch, tokens, key_BmGK.shape[2], -1, width)


def backward_inputs(dout_BnGJV: jax.Array, out_BnGJV: jax.Array, log_sum_BGJn: jax.Array) -> BackwardInputs:
    """Return what the backward pass reads, from the gradients of outputs, the outputs, and the log-sum-exp."""
    mean_BnGJ = jnp.sum(dout_BnGJV.astype(jnp.float32) * out_BnGJV.astype(jnp.float32), axis=-1)
    return BackwardInputs(dout_BnGJV, log_sum_BGJn, jnp.moveaxis(mean_BnGJ, 1, 3))


def sink_gradient(sink_H: Float[Array, " H"] | None, saved: BackwardInputs) -> Float[Array, " H"] | None:
    """Return the gradient of the sinks, if there are any. A sink has a softmax weight, but no value."""
    if sink_H is None:
        return None
    weight_BGJn = jnp.exp(_group_sinks(sink_H, saved.log_sum_BGJn.shape[1]) - saved.log_sum_BGJn)
    return -jnp.sum(weight_BGJn * saved.mean_BGJn, axis=(0, 3)).reshape(-1).astype(sink_H.dtype)


def zero_gradients(inputs: TileInputs) -> tuple[jax.Array, jax.Array]:
    """Return zero gradients for keys and values."""
    return jnp.zeros(inputs.key_BmGK.shape, jnp.float32), jnp.zeros(inputs.value_BmGV.shape, jnp.float32)


def accumulate_gradients(grads: Gradients, inputs: TileInputs, saved: BackwardInputs) -> Gradients:
    """Add the gradients of all pairs of tiles."""

    def add(grads: Gradients, pair_2: jax.Array) -> tuple[Gradients, None]:
        start_t, start_s = inputs.tile * pair_2
        query, key, value = _tiles(inputs, start_t, start_s)
        dout_BtGJV = _tile(saved.dout_BnGJV, start_t, inputs.tile, 1)
        log_sum_BGJt, mean_BGJt = (_tile(x, start_t, inputs.tile, 3) for x in (saved.log_sum_BGJn, saved.mean_BGJn))
        weight = jnp.exp(_logits(inputs, query, key, start_t, start_s) - log_sum_BGJt[..., None])
        dweight = _product("btgjv,bsgv->bgjts", dout_BtGJV, value)
        dlogit = inputs.scale * weight * (dweight - mean_BGJt[..., None])
        dquery = _product("bgjts,bsgk->btgjk", dlogit, key)
        dkey = _product("bgjts,btgjk->bsgk", dlogit, query)
        dvalue = _product("bgjts,btgjv->bsgv", weight, dout_BtGJV)
        return Gradients(
            _add(grads.query_BnGJK, dquery, start_t),
            _add(grads.key_BmGK, dkey, start_s),
            _add(grads.value_BmGV, dvalue, start_s),
        ), None

    return jax.lax.scan(add, grads, inputs.pairs_P2)[0]


def _tiles(
    inputs: TileInputs, start_t: Int[Array, ""], start_s: Int[Array, ""]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the queries, keys and values of a pair of tiles."""
    key, value = (_tile(x, start_s, inputs.tile, 1) for x in (inputs.key_BmGK, inputs.value_BmGV))
    return _tile(inputs.query_BnGJK, start_t, inputs.tile, 1), key, value


def _logits(
    inputs: TileInputs, query_BtGJK: jax.Array, key_BsGK: jax.Array, start_t: jax.Array, start_s: jax.Array
) -> Float[Array, "B G J t s"]:
    """Return the masked logits of a pair of tiles."""
    logit = inputs.scale * _product("btgjk,bsgk->bgjts", query_BtGJK, key_BsGK)

    def of_tiles(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, key = pair
        return _tile(query, start_t, inputs.tile, query.ndim - 1), _tile(key, start_s, inputs.tile, key.ndim - 1)

    if inputs.positions is not None:
        position_t, position_s = of_tiles(inputs.positions)
        logit = jnp.where(causal_mask(position_t, position_s, inputs.window), logit, _MASKED)
    if inputs.documents is not None:
        document_Bt, document_Bs = of_tiles(inputs.documents)
        logit = jnp.where(same_document(document_Bt, document_Bs)[:, None, None], logit, _MASKED)
    return logit


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute an einsum in float32, with operands in the dtype of `y`."""
    return jnp.einsum(equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _tile(x: jax.Array, start: jax.Array, tile: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, tile, dim)


def _put(x: jax.Array, part: jax.Array, start: jax.Array, dim: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, dim)


def _add(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return _put(x, _tile(x, start, part.shape[1], 1) + part, start, 1)
