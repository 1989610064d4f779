"""Causal attention of tokens that one rank has: one function for each kernel.

B sequences, N tokens, H heads of queries, G of keys and values, K width of queries and keys, V of values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.core import seen_before, weighted_values


def xla(
    query: Float[Array, "B N H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
) -> Float[Array, "B N H V"]:
    """With the logits of all pairs in memory."""
    if window is None and query.shape[-1] == value.shape[-1]:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True)
    position = jnp.arange(query.shape[1])
    seen_NN = seen_before(position, position, window)
    if query.shape[-1] == value.shape[-1]:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, mask=seen_NN[None, None])
    return weighted_values(query, key, value, seen_NN, scale)


def cudnn(
    query: Float[Array, "B N H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
) -> Float[Array, "B N H V"]:
    """cuDNN's flash attention. Values are as wide as keys there: narrower ones are filled up with 0."""
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[-1] - width)))
    before = None if window is None else (window - 1, 0)
    seen = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=True, local_window_size=before, implementation="cudnn"
    )
    return seen[..., :width]


# query, key, value, tokens that a token sees, itself included (None: all before it), factor of the logits → values seen
KERNELS: dict[str, Callable[..., jax.Array]] = {"xla": xla, "cudnn": cudnn}
