"""Grouped-query attention.

B sequences of L tokens, of which N are of this context rank; D model width, H query heads, G key/value heads, K head
width. Each of t tensor ranks has n = N/t tokens of a sequence, and computes H/t of the query heads and G/t of the
key/value heads. S tokens in the cache.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import AttentionConfig, AttentionView, ModelConfig
from moe_jax.models.attention.core import (
    AttentionImpl,
    masked_attention,
    position_in_document,
    update_slots,
    visible_slots,
)
from moe_jax.models.attention.kernels import KERNELS
from moe_jax.models.attention.max_logits import with_max_logits
from moe_jax.models.attention.over_context import FORMS
from moe_jax.models.layers import norm, norm_weight, rms_norm, wide_product
from moe_jax.models.rope import logit_scale, rotate
from moe_jax.parallel.context import context_ranks, own_positions
from moe_jax.parallel.sequence_shards import own_count, tp_all_gather

Cache = tuple[Float[Array, "B G K S"], Float[Array, "B G K S"]]


def heads(
    params: Any,
    h_BnD: Float[Array, "B n D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B N H K"], Float[Array, " H"] | None]:
    """Return the output of each head, and its largest logit if `impl` asks for it.

    `document_BL` has the numbers of the documents of all tokens; None: all are of one.
    """
    h_BND = tp_all_gather(h_BnD, 1)
    positions = jnp.broadcast_to(own_positions(h_BND.shape[1]), h_BND.shape[:2])
    length = h_BND.shape[1] * context_ranks()
    query, key, value = _project(params, h_BND, positions, model, view, length, document_BL)
    with jax.named_scope("attention"):
        scale = logit_scale(model)
        if context_ranks() > 1:
            form = FORMS[impl.context_form]
            out = form(query, (key, value), (), params.get("sink"), document_BL, None, view.window, scale)
        else:
            out = KERNELS[impl.kernel](query, key, value, view.window, scale, params.get("sink"), document_BL)
    out, largest = with_max_logits(out, query, key, lambda key: key, document_BL, view.window, scale, impl)
    return _gated(params, h_BND, out), largest


def first_cache(model: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Return an empty cache of this rank's keys and values."""
    shape = (batch, own_count(model.kv_heads), model.head_width, length)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def cached_heads(
    params: Any,
    h_BND: Float[Array, "B N D"],
    cache: Cache,
    position_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    model: ModelConfig,
    view: AttentionView,
) -> tuple[Float[Array, "B N H K"], Cache]:
    """Return the output of each head for N further tokens, the first at `position_B`, and the updated cache.

    The slots of tokens that do not count are filled again before a later token sees them.
    """
    position_BN = position_B[:, None] + jnp.arange(h_BND.shape[1])
    slots = cache[0].shape[-1]
    query, *new = _project(params, h_BND, position_BN, model, view, slots)
    key_BGKS, value_BGKS = (update_slots(old, each, position_B) for old, each in zip(cache, new, strict=True))
    keys, values = (jnp.moveaxis(each, -1, 1) for each in (key_BGKS, value_BGKS))
    mask_BNS = visible_slots(position_BN, slots, view)
    scale = logit_scale(model)
    if "sink" in params:
        weighted = partial(masked_attention, mask=mask_BNS, scale=scale, sink_H=params["sink"])
        out = wide_product(weighted, query, keys, values)
    else:
        out = jax.nn.dot_product_attention(query, keys, values, mask=mask_BNS[:, None], scale=scale)
    return _gated(params, h_BND, out), (key_BGKS, value_BGKS)


def _gated(params: Any, h_BND: Float[Array, "B N D"], out_BNHK: Float[Array, "B N H K"]) -> Float[Array, "B N H K"]:
    """Return the outputs of the heads, times a sigmoid of the tokens' features if there is an output gate."""
    if "gate" not in params:
        return out_BNHK
    return out_BNHK * jax.nn.sigmoid(jnp.einsum("bnd,dhk->bnhk", h_BND, params["gate"].astype(h_BND.dtype)))


def _project(
    params: Any,
    h_BND: Float[Array, "B N D"],
    position_BN: Int[Array, "B N"],
    model: ModelConfig,
    view: AttentionView,
    length: int,
    document_BL: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B N H K"], Float[Array, "B N G K"], Float[Array, "B N G K"]]:
    """Return normed and rotated queries and keys, and values, for sequences of at most `length` tokens."""

    def normed(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _NORMS[model.qk_norm_over](query, key, params, model)

    def projection(name: str) -> jax.Array:
        y = jnp.einsum("bnd,dhk->bnhk", h_BND, params[name].astype(h_BND.dtype))
        return y + params[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in params else y

    query, key, value = map(projection, ("query", "key", "value"))
    if model.qk_norm and not model.qk_norm_after_rope:
        query, key = normed(query, key)
    if view.rope:
        query, key = (_rotate(x, position_BN, model, length) for x in (query, key))
        if model.qk_l2_norm:
            query, key = (rms_norm(x, jnp.ones(x.shape[-1]), model.rms_norm_eps) for x in (query, key))
    elif model.attention.attn_scale:
        number_BN = position_BN if view.chunk is not None else position_in_document(position_BN, document_BL)
        query = query * _temperature(number_BN, model.attention)[:, :, None, None].astype(query.dtype)
    if model.qk_norm and model.qk_norm_after_rope:
        query, key = normed(query, key)
    return query, key, value


def _temperature(position_BN: Int[Array, "B N"], attention: AttentionConfig) -> Float[Array, "B N"]:
    """Return what queries are multiplied by, which grows with their position (Nakanishi 2025, as in Llama 4)."""
    floor = jnp.floor((position_BN.astype(jnp.float32) + 1) / attention.floor_scale)
    return 1 + attention.attn_scale * jnp.log1p(floor)


def _rotate(x_BNHK: jax.Array, position_BN: Int[Array, "B N"], model: ModelConfig, length: int) -> jax.Array:
    """Rotate the first features of each head, or all of them."""
    width = model.rotary_width
    if width == x_BNHK.shape[-1]:
        return rotate(x_BNHK, position_BN, model, length)
    return jnp.concatenate([rotate(x_BNHK[..., :width], position_BN, model, length), x_BNHK[..., width:]], axis=-1)


def _norm_heads(query: jax.Array, key: jax.Array, params: Any, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Apply RMSNorm to each head of queries and keys."""
    return norm(query, params["query_norm"], model), norm(key, params["key_norm"], model)


def _norm_projections(query: jax.Array, key: jax.Array, params: Any, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Apply RMSNorm over all heads together, including those of other tensor ranks."""
    wide = [x.astype(jnp.float32) for x in (query, key)]
    own_BN2 = jnp.stack([jnp.square(x).sum(axis=(-2, -1)) for x in wide], axis=-1)
    square_BN2 = tp_all_gather(own_BN2[None], 0).sum(axis=0)
    width_2 = jnp.array([model.num_attention_heads, model.kv_heads]) * model.head_width
    inverse_rms = jax.lax.rsqrt(square_BN2 / width_2 + model.rms_norm_eps)
    query_HK, key_GK = (norm_weight(params[name], model) for name in ("query_norm", "key_norm"))
    return (
        (wide[0] * inverse_rms[..., :1, None] * query_HK).astype(query.dtype),
        (wide[1] * inverse_rms[..., 1:, None] * key_GK).astype(key.dtype),
    )


_NORMS = {"head": _norm_heads, "projection": _norm_projections}
