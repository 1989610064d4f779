"""Causal attention: one file for each way to keys and values.

B sequences, N tokens of this context rank, D model width, H query heads, V width of a head's value; of t tensor ranks
each has n = N/t tokens of a sequence, and computes with H/t of the heads. S tokens in a cache.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.models.attention import grouped, latent
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.layers import rms_norm
from moe_jax.parallel.tensor_axis import tp_reduce_scatter


class ContextForm(NamedTuple):
    """A way to keys and values."""

    # params, normed tokens [B, n, D], model, view, way → values that each head saw [B, N, H, V]
    heads: Callable[..., jax.Array]
    first_cache: Callable[..., Any]  # model, batch, length, dtype → an empty cache
    # params, one normed token [B, 1, D], cache, its position, model, view → the same for it, and the cache with it
    next_heads: Callable[..., tuple[jax.Array, Any]]


_GROUPED = ContextForm(grouped.heads, grouped.first_cache, grouped.next_heads)
_LATENT = ContextForm(latent.heads, latent.first_cache, latent.next_heads)


def form_of(model: ModelConfig) -> ContextForm:
    """The one that a model has."""
    return _LATENT if model.has_latents else _GROUPED


def attend(
    params: Any, x_BnD: Float[Array, "B n D"], model: ModelConfig, view: AttentionView, way: AttentionImpl
) -> Float[Array, "B n D"]:
    """What attention adds to the residual stream, its pre-norm included; inside `shard_map`."""
    h_BnD = rms_norm(x_BnD, params["norm"], model.rms_norm_eps)
    y_BnD = tp_reduce_scatter(_output(params, form_of(model).heads(params, h_BnD, model, view, way)), 1)
    return y_BnD + params["out_bias"].astype(y_BnD.dtype) if "out_bias" in params else y_BnD


def attend_next(
    params: Any, x_B1D: Float[Array, "B 1 D"], cache: Any, position: jax.Array, model: ModelConfig, view: AttentionView
) -> tuple[Float[Array, "B 1 D"], Any]:
    """The same for the token at `position`, and the cache with it; on one tensor rank."""
    h_B1D = rms_norm(x_B1D, params["norm"], model.rms_norm_eps)
    seen_B1HV, cache = form_of(model).next_heads(params, h_B1D, cache, position, model, view)
    y_B1D = _output(params, seen_B1HV)
    return y_B1D + params["out_bias"].astype(y_B1D.dtype) if "out_bias" in params else y_B1D, cache


def _output(params: Any, seen_BNHV: Float[Array, "B N H V"]) -> Float[Array, "B N D"]:
    """Heads back to the model width: of all heads the sum, of some their part of it."""
    return jnp.einsum("bnhv,hvd->bnd", seen_BNHV, params["out"].astype(seen_BNHV.dtype))
