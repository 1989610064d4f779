"""Grouped-query attention.

B sequences, N tokens, D model width, H query heads, G key/value heads, K head width; of t tensor ranks each has n = N/t
tokens of a sequence, and computes with H/t and G/t of the heads. S tokens in the cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Model
from moe_jax.models.layers import rms_norm, rotate
from moe_jax.parallel.tensor_axis import gathered

Cache = tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]


def heads(params: Any, h_BnD: Float[Array, "B n D"], model: Model) -> Float[Array, "B N H K"]:
    """The values that each head saw."""
    h_BND = gathered(h_BnD, 1)
    positions = jnp.broadcast_to(jnp.arange(h_BND.shape[1]), h_BND.shape[:2])
    query, key, value = _project(params, h_BND, positions, model)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def first_cache(model: Model, batch: int, length: int, dtype: Any) -> Cache:
    """Keys and values."""
    shape = (batch, length, model.kv_heads, model.head_width)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def next_heads(
    params: Any, h_B1D: Float[Array, "B 1 D"], cache: Cache, position: Int[Array, ""], model: Model
) -> tuple[Float[Array, "B 1 H K"], Cache]:
    """The values that each head of one more token saw."""
    query, key, value = _project(params, h_B1D, jnp.full((h_B1D.shape[0], 1), position), model)
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
        for old, new in zip(cache, (key, value), strict=True)
    )
    seen = (jnp.arange(keys.shape[1]) <= position)[None, None, None, :]
    return jax.nn.dot_product_attention(query, keys, values, mask=seen), (keys, values)


def _project(
    params: Any, h_BND: Float[Array, "B N D"], position_BN: Int[Array, "B N"], model: Model
) -> tuple[Float[Array, "B N H K"], Float[Array, "B N G K"], Float[Array, "B N G K"]]:
    """Rotated queries and keys, and values."""
    query, key, value = (
        jnp.einsum("bnd,dhk->bnhk", h_BND, params[name].astype(h_BND.dtype)) for name in ("query", "key", "value")
    )
    if model.qk_norm:
        query = rms_norm(query, params["query_norm"], model.norm_eps)
        key = rms_norm(key, params["key_norm"], model.norm_eps)
    return rotate(query, position_BN, model.rope_theta), rotate(key, position_BN, model.rope_theta), value
