"""Grouped-query attention.

B sequences of L tokens, of which N are of this context rank; D model width, H query heads, G key/value heads, K head
width. Each of t tensor ranks has n = N/t tokens of a sequence, and computes H/t of the query heads and G/t of the
key/value heads. S tokens in the cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.models.attention.core import AttentionImpl, causal_mask, masked_attention
from moe_jax.models.attention.kernels import KERNELS
from moe_jax.models.attention.over_context import FORMS
from moe_jax.models.layers import rms_norm
from moe_jax.models.rope import rotate
from moe_jax.parallel.context import context_ranks, own_positions
from moe_jax.parallel.tensor_axis import tp_all_gather

Cache = tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]


def heads(
    params: Any,
    h_BnD: Float[Array, "B n D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B L"] | None = None,
) -> Float[Array, "B N H K"]:
    """Return the output of each head.

    `document_BL` has the numbers of the documents of all tokens; None: all are of one.
    """
    h_BND = tp_all_gather(h_BnD, 1)
    positions = jnp.broadcast_to(own_positions(h_BND.shape[1]), h_BND.shape[:2])
    query, key, value = _project(params, h_BND, positions, model, view)
    with jax.named_scope("attention"):
        scale = query.shape[-1] ** -0.5
        if context_ranks() > 1:
            form = FORMS[impl.context_form]
            return form(query, (key, value), (), params.get("sink"), document_BL, None, view.window, scale)
        return KERNELS[impl.kernel](query, key, value, view.window, scale, params.get("sink"), document_BL)


def first_cache(model: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Return an empty cache of keys and values."""
    shape = (batch, length, model.kv_heads, model.head_width)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def next_heads(
    params: Any,
    h_B1D: Float[Array, "B 1 D"],
    cache: Cache,
    position: Int[Array, ""],
    model: ModelConfig,
    view: AttentionView,
) -> tuple[Float[Array, "B 1 H K"], Cache]:
    """Return the output of each head for one more token, and the updated cache."""
    query, key, value = _project(params, h_B1D, jnp.full((h_B1D.shape[0], 1), position), model, view)
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
        for old, new in zip(cache, (key, value), strict=True)
    )
    mask_NS = causal_mask(position[None], jnp.arange(keys.shape[1]), view.window)
    return _attend_to_cache(params, query, keys, values, mask_NS), (keys, values)


def _attend_to_cache(
    params: Any,
    query: Float[Array, "B N H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    mask_NS: Bool[Array, "N S"],
) -> Float[Array, "B N H K"]:
    if "sink" in params:
        return masked_attention(query, key, value, mask_NS, query.shape[-1] ** -0.5, params["sink"])
    return jax.nn.dot_product_attention(query, key, value, mask=mask_NS[None, None])


def _project(
    params: Any, h_BND: Float[Array, "B N D"], position_BN: Int[Array, "B N"], model: ModelConfig, view: AttentionView
) -> tuple[Float[Array, "B N H K"], Float[Array, "B N G K"], Float[Array, "B N G K"]]:
    """Return normed and rotated queries and keys, and values."""

    def projection(name: str) -> jax.Array:
        y = jnp.einsum("bnd,dhk->bnhk", h_BND, params[name].astype(h_BND.dtype))
        return y + params[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in params else y

    query, key, value = map(projection, ("query", "key", "value"))
    if model.qk_norm:
        query, key = _NORMS[model.qk_norm_over](query, key, params, model)
    if view.rope:
        query, key = (rotate(x, position_BN, model) for x in (query, key))
    return query, key, value


def _norm_heads(query: jax.Array, key: jax.Array, params: Any, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Apply RMSNorm to each head of queries and keys."""
    eps = model.rms_norm_eps
    return rms_norm(query, params["query_norm"], eps), rms_norm(key, params["key_norm"], eps)


def _norm_projections(query: jax.Array, key: jax.Array, params: Any, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Apply RMSNorm over all heads together, including those of other tensor ranks."""
    wide = [x.astype(jnp.float32) for x in (query, key)]
    own_BN2 = jnp.stack([jnp.square(x).sum(axis=(-2, -1)) for x in wide], axis=-1)
    square_BN2 = tp_all_gather(own_BN2[None], 0).sum(axis=0)
    width_2 = jnp.array([model.num_attention_heads, model.kv_heads]) * model.head_width
    inverse_rms = jax.lax.rsqrt(square_BN2 / width_2 + model.rms_norm_eps)
    query_HK, key_GK = params["query_norm"], params["key_norm"]
    return (
        (wide[0] * inverse_rms[..., :1, None] * query_HK).astype(query.dtype),
        (wide[1] * inverse_rms[..., 1:, None] * key_GK).astype(key.dtype),
    )


_NORMS = {"head": _norm_heads, "projection": _norm_projections}
