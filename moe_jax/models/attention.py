"""Causal grouped-query attention.

B sequences, N tokens, D model width, H query heads, G key/value heads, K head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Model
from moe_jax.models.layers import rms_norm, rotate


def attend(params: Any, x_BND: Float[Array, "B N D"], model: Model) -> Float[Array, "B N D"]:
    """What attention adds to the residual stream, its pre-norm included."""
    positions = jnp.broadcast_to(jnp.arange(x_BND.shape[1]), x_BND.shape[:2])
    query, key, value = project(params, x_BND, positions, model)
    return output(params, jax.nn.dot_product_attention(query, key, value, is_causal=True))


def project(
    params: Any, x_BND: Float[Array, "B N D"], position_BN: Int[Array, "B N"], model: Model
) -> tuple[Float[Array, "B N H K"], Float[Array, "B N G K"], Float[Array, "B N G K"]]:
    """Normed, rotated queries and keys, and values."""
    h_BND = rms_norm(x_BND, params["norm"], model.norm_eps)
    query, key, value = (
        jnp.einsum("bnd,dhk->bnhk", h_BND, params[name].astype(x_BND.dtype)) for name in ("query", "key", "value")
    )
    if model.qk_norm:
        query = rms_norm(query, params["query_norm"], model.norm_eps)
        key = rms_norm(key, params["key_norm"], model.norm_eps)
    return rotate(query, position_BN, model.rope_theta), rotate(key, position_BN, model.rope_theta), value


def output(params: Any, attended_BNHK: Float[Array, "B N H K"]) -> Float[Array, "B N D"]:
    """Heads back to the model width."""
    return jnp.einsum("bnhk,hkd->bnd", attended_BNHK, params["out"].astype(attended_BNHK.dtype))
