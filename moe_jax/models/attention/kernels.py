"""Causal attention over tokens that are all on one rank: one function for each kernel.

The splash kernel that JAX ships for TPUs is a FlashAttention that skips the blocks that a mask hides. It is imported
where it is called, since only TPUs use it and it loads all of Pallas for TPUs.

B sequences, N tokens, H heads of queries, G of keys and values, K width of queries and keys, V width of values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config.attention_kernels import splash_block
from moe_jax.models.attention.core import causal_mask, masked_attention, same_document
from moe_jax.models.attention.tiled import whole_sequence


def splash(
    query_BNHK: Float[Array, "B N H K"],
    key_BNGK: Float[Array, "B N G K"],
    value_BNGV: Float[Array, "B N G V"],
    window: int | None,
    scale: float,
    sink_H: Float[Array, " H"] | None = None,
    document_BN: Int[Array, "B N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H V"]:
    """Compute attention with the splash kernel. N must be a multiple of 128.

    `interpret` runs the kernel without a TPU, slowly. The backward pass has a kernel for the gradients of queries and
    one for those of keys and values: the fused one stores the former for each block of keys, so that memory would grow
    with the square of N.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = query_BNHK.shape[1:3]
    shape, block = (length, length), splash_block(length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    sizes = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    groups = key_BNGK.shape[2]
    attend = kernel.make_splash_mqa(
        masks.MultiHeadMask([mask] * (heads // groups)),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        interpret=interpret,
    )
    query = (query_BNHK * scale).reshape(*query_BNHK.shape[:2], groups, -1, query_BNHK.shape[-1])
    query_BGJNK = query.transpose(0, 2, 3, 1, 4)
    key_BGNK, value_BGNV = key_BNGK.swapaxes(1, 2), value_BNGV.swapaxes(1, 2)
    sink_GJ = None if sink_H is None else sink_H.reshape(groups, -1)
    documents = None if document_BN is None else kernel.SegmentIds(document_BN, document_BN)
    # sequences and groups are parallel to the kernel, so that both cores of a chip compute its backward pass
    of_sequence = jax.vmap(attend, in_axes=(0, 0, 0, None, 0))
    out_BGJNV = jax.vmap(of_sequence, in_axes=(0, 0, 0, 0, None))(query_BGJNK, key_BGNK, value_BGNV, documents, sink_GJ)
    return out_BGJNV.transpose(0, 3, 1, 2, 4).reshape(*query_BNHK.shape[:3], -1)


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
