"""Causal attention over tokens that are all on one rank: one function for each kernel.

B sequences, N tokens, H heads of queries, G of keys and values, K width of queries and keys, V width of values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.attention.core import causal_mask, masked_attention, same_document
from moe_jax.models.attention.splash import splash
from moe_jax.models.attention.tiled import whole_sequence


def xla(
    query: Float[Array, "B N H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
    sink: Float[Array, " H"] | None = None,
    document: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N H V"]:
    """Compute attention in XLA, with the logits of all pairs of tokens in memory."""
    plain = query.shape[-1] == value.shape[-1] and sink is None and document is None
    if plain and window is None:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True)
    position = jnp.arange(query.shape[1])
    mask_NN = causal_mask(position, position, window)
    if plain:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, mask=mask_NN[None, None])
    mask = mask_NN if document is None else mask_NN & same_document(document, document)
    return masked_attention(query, key, value, mask, scale, sink)


def cudnn(
    query: Float[Array, "B N H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
    sink: None = None,
    document: None = None,
) -> Float[Array, "B N H V"]:
    """Compute attention with the flash attention of cuDNN, which has no sinks and no documents.

    cuDNN needs values as wide as keys: narrower values are padded with 0.
    """
    assert sink is None, "config/attention_kernels.py chooses another kernel for sinks"
    assert document is None, "config/attention_kernels.py chooses another kernel for documents"
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[-1] - width)))
    local_window = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=True, local_window_size=local_window, implementation="cudnn"
    )
    return out[..., :width]


# query, key, value, window (tokens a token attends to, itself included; None: all before it), scale of the logits,
# sinks or None, numbers of the tokens' documents or None → output of each head
KERNELS: dict[str, Callable[..., jax.Array]] = {"xla": xla, "tiled": whole_sequence, "cudnn": cudnn, "splash": splash}
