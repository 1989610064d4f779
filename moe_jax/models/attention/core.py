"""Softmax attention where JAX's own does not do: values of another width than keys, and sinks.

B sequences, N queries, S keys, H heads of queries, G of keys and values, K width of queries and keys, V of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class AttentionImpl(NamedTuple):
    """How attention is computed, as opposed to what."""

    kernel: str = "xla"  # of tokens that one rank has, see `kernels`
    context_form: str = "ring"  # over context ranks, see `over_context`


def seen_before(query_N: Int[Array, " N"], key_S: Int[Array, " S"], window: int | None) -> Bool[Array, "N S"]:
    """Whether the token at a query's position sees the one at a key's."""
    age_NS = query_N[:, None] - key_S
    return age_NS >= 0 if window is None else (age_NS >= 0) & (age_NS < window)


def weighted_values(
    query_BNHK: Float[Array, "B N H K"],
    key_BSGK: Float[Array, "B S G K"],
    value_BSGV: Float[Array, "B S G V"],
    seen_NS: Bool[Array, "N S"],
    scale: float,
    sink_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B N H V"]:
    """Values weighted by a softmax in float32 over the keys that are seen, and over a sink that has no value."""
    batch, tokens, num_attention_heads, width = query_BNHK.shape
    groups, dtype = key_BSGK.shape[2], query_BNHK.dtype
    query = query_BNHK.reshape(batch, tokens, groups, num_attention_heads // groups, width)
    # a product of one type with a result of another would be transposed with mixed types
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if dtype == jnp.bfloat16 else None
    logits = jnp.einsum("bngjk,bsgk->bgjns", query, key_BSGK, precision=precision, preferred_element_type=jnp.float32)
    logits = jnp.where(seen_NS, logits * scale, jnp.finfo(jnp.float32).min / 2)
    if sink_H is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        sink = sink_H.astype(jnp.float32).reshape(groups, -1, 1, 1)
        peak = jax.lax.stop_gradient(jnp.maximum(logits.max(axis=-1, keepdims=True), sink))
        share = jnp.exp(logits - peak)
        weights = share / (share.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak))
    seen = jnp.einsum("bgjns,bsgv->bngjv", weights.astype(dtype), value_BSGV)
    return seen.reshape(batch, tokens, num_attention_heads, value_BSGV.shape[-1])
