"""Softmax attention for what JAX's own does not support: values of another width than keys, sinks, documents; and the
cache of decoding, which has one slot for each token of a sequence, at its position.

B sequences, N queries or further tokens, S keys or slots, H heads of queries, G of keys and values (J = H/G queries for
each), K width of queries and keys, V width of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import AttentionView


class AttentionImpl(NamedTuple):
    """The implementation of attention. It does not change the results beyond rounding."""

    kernel: str = "xla"  # where one rank has all tokens of a sequence, see `kernels`
    context_form: str = "ring"  # over several context ranks, see `over_context`
    max_logits: bool = False  # whether the largest logit of each head is computed, too, see `max_logits`
    platform: str = "cpu"  # of the devices: cpu, gpu or tpu


def causal_mask(query_N: Int[Array, " N"], key_S: Int[Array, " S"], window: int | None) -> Bool[Array, "N S"]:
    """Return whether the token at the position of each query attends to the token at the position of each key."""
    age_NS = query_N[:, None] - key_S
    return age_NS >= 0 if window is None else (age_NS >= 0) & (age_NS < window)


def same_document(query_BN: Int[Array, "B N"], key_BS: Int[Array, "B S"]) -> Bool[Array, "B N S"]:
    """Return whether the tokens of each query and each key are of one document, from the numbers of their documents."""
    return query_BN[:, :, None] == key_BS[:, None, :]


def position_in_document(position_BN: Int[Array, "B N"], document_BL: Int[Array, "B L"] | None) -> Int[Array, "B N"]:
    """Return positions in sequences as positions in documents; `document_BL` has those of all tokens, None: one."""
    if document_BL is None:
        return position_BN
    begins_BL = jnp.diff(document_BL, axis=1, prepend=document_BL[:, :1]) != 0
    begin_BL = jax.lax.cummax(jnp.where(begins_BL, jnp.arange(document_BL.shape[1]), 0), axis=1)
    return position_BN - jnp.take_along_axis(begin_BL, position_BN, axis=1)


def masked_attention(
    query_BNHK: Float[Array, "B N H K"],
    key_BSGK: Float[Array, "B S G K"],
    value_BSGV: Float[Array, "B S G V"],
    mask: Bool[Array, "*B N S"],
    scale: float,
    sink_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B N H V"]:
    """Return values weighted by a softmax over the visible keys, computed in float32.

    `mask` marks the visible keys, for all sequences or for each of them. A sink is one more logit of each head that has
    no value.
    """
    batch, tokens, num_attention_heads, width = query_BNHK.shape
    groups, dtype = key_BSGK.shape[2], query_BNHK.dtype
    query = query_BNHK.reshape(batch, tokens, groups, num_attention_heads // groups, width)
    # with `preferred_element_type` alone, the transpose of the product would have operands of mixed types
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if dtype == jnp.bfloat16 else None
    logits = jnp.einsum("bngjk,bsgk->bgjns", query, key_BSGK, precision=precision, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[..., None, None, :, :], logits * scale, jnp.finfo(jnp.float32).min / 2)
    if sink_H is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        sink = sink_H.astype(jnp.float32).reshape(groups, -1, 1, 1)
        peak = jax.lax.stop_gradient(jnp.maximum(logits.max(axis=-1, keepdims=True), sink))
        exp = jnp.exp(logits - peak)
        weights = exp / (exp.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak))
    out_BNGJV = jnp.einsum("bgjns,bsgv->bngjv", weights.astype(dtype), value_BSGV)
    return out_BNGJV.reshape(batch, tokens, num_attention_heads, value_BSGV.shape[-1])


def update_slots(
    cache_BS: Float[Array, "B ... S"], new_BN: Float[Array, "B N ..."], position_B: Int[Array, " B"]
) -> Float[Array, "B ... S"]:
    """Return the cache with the features of further tokens, which begin at `position_B` in each sequence.

    Slots come last, as CPUs multiply them: otherwise the whole cache would be transposed for each token.
    """
    put = jax.vmap(lambda slots, new, position: jax.lax.dynamic_update_slice_in_dim(slots, new, position, axis=-1))
    return put(cache_BS, jnp.moveaxis(new_BN, 1, -1), position_B)


def visible_slots(position_BN: Int[Array, "B N"], slots: int, view: AttentionView) -> Bool[Array, "B N S"]:
    """Return whether the token at each position attends to the token in each slot."""
    slot_S = jnp.arange(slots)
    is_seen_BNS = jax.vmap(lambda position_N: causal_mask(position_N, slot_S, view.window))(position_BN)
    if view.chunk is None:
        return is_seen_BNS
    return is_seen_BNS & (position_BN[:, :, None] // view.chunk == slot_S // view.chunk)
