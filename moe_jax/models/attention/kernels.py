"""Causal attention over tokens that are all on one rank: one function for each kernel.

B sequences, N tokens, H heads of queries, G of keys and values, K width of queries and keys, V width of values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.models.attention.core import causal_mask, masked_attention


def xla(
    query: Float[Array, "B N H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
) -> Float[Array, "B N H V"]:
    """Compute attention in XLA, with the logits of all pairs of tokens in memory."""
    if window is None and query.shape[-1] == value.shape[-1]:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True)
    position = jnp.arange(query.shape[1])
    mask_NN = causal_mask(position, position, window)
    if query.shape[-1] == value.shape[-1]:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, mask=mask_NN[None, None])
    return masked_attention(query, key, value, mask_NN, scale)


def cudnn(
    query: Float[Array, "B N H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
) -> Float[Array, "B N H V"]:
    """Compute attention with the flash attention of cuDNN.

    cuDNN needs values as wide as keys: narrower values are padded with 0.
    """
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[-1] - width)))
    local_window = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=True, local_window_size=local_window, implementation="cudnn"
    )
    return out[..., :width]


# query, key, value, window (tokens a token attends to, itself included; None: all before it), scale of the logits →
# output of each head
KERNELS: dict[str, Callable[..., jax.Array]] = {"xla": xla, "cudnn": cudnn}
