"""Softmax attention where JAX's own does not do: values of another width than keys.

B sequences, N queries, S keys, H heads of queries, G of keys and values, K width of queries and keys, V of values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def seen_before(query_N: Int[Array, " N"], key_S: Int[Array, " S"]) -> Bool[Array, "N S"]:
    """Whether the token at a query's position sees the one at a key's."""
    return key_S <= query_N[:, None]


def weighted_values(
    query_BNHK: Float[Array, "B N H K"],
    key_BSGK: Float[Array, "B S G K"],
    value_BSGV: Float[Array, "B S G V"],
    seen_NS: Bool[Array, "N S"],
    scale: float,
) -> Float[Array, "B N H V"]:
    """Values weighted by a softmax in float32 over the keys that are seen."""
    batch, tokens, num_heads, width = query_BNHK.shape
    groups, dtype = key_BSGK.shape[2], query_BNHK.dtype
    query = query_BNHK.reshape(batch, tokens, groups, num_heads // groups, width)
    # a product of one type with a result of another would be transposed with mixed types (jax issue 24047)
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if dtype == jnp.bfloat16 else None
    logits = jnp.einsum("bngjk,bsgk->bgjns", query, key_BSGK, precision=precision, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen_NS, logits * scale, jnp.finfo(jnp.float32).min / 2), axis=-1)
    seen = jnp.einsum("bgjns,bsgv->bngjv", weights.astype(dtype), value_BSGV)
    return seen.reshape(batch, tokens, num_heads, value_BSGV.shape[-1])
