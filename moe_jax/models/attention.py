"""Causal grouped-query attention.

B sequences, N tokens, D model width, H query heads, G key/value heads, K head width; of t tensor ranks each has n = N/t
tokens of a sequence, and computes with H/t and G/t of the heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Model
from moe_jax.models.layers import rms_norm, rotate
from moe_jax.parallel.tensor_axis import gathered, summed


def attend(params: Any, x_BnD: Float[Array, "B n D"], model: Model) -> Float[Array, "B n D"]:
    """What attention adds to the residual stream, its pre-norm included; inside `shard_map`."""
    h_BND = gathered(rms_norm(x_BnD, params["norm"], model.norm_eps), 1)
    positions = jnp.broadcast_to(jnp.arange(h_BND.shape[1]), h_BND.shape[:2])
    query, key, value = project(params, h_BND, positions, model)
    return summed(output(params, jax.nn.dot_product_attention(query, key, value, is_causal=True)), 1)


def project(
    params: Any, h_BND: Float[Array, "B N D"], position_BN: Int[Array, "B N"], model: Model
) -> tuple[Float[Array, "B N H K"], Float[Array, "B N G K"], Float[Array, "B N G K"]]:
    """Rotated queries and keys, and values, of what came out of the pre-norm."""
    query, key, value = (
        jnp.einsum("bnd,dhk->bnhk", h_BND, params[name].astype(h_BND.dtype)) for name in ("query", "key", "value")
    )
    if model.qk_norm:
        query = rms_norm(query, params["query_norm"], model.norm_eps)
        key = rms_norm(key, params["key_norm"], model.norm_eps)
    return rotate(query, position_BN, model.rope_theta), rotate(key, position_BN, model.rope_theta), value


def output(params: Any, attended_BNHK: Float[Array, "B N H K"]) -> Float[Array, "B N D"]:
    """Heads back to the model width: of all heads the sum, of some their part of it."""
    return jnp.einsum("bnhk,hkd->bnd", attended_BNHK, params["out"].astype(attended_BNHK.dtype))
