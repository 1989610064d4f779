"""The recurrence of Mamba-2 (Dao & Gu 2024, "Transformers are SSMs", section 6), in chunks and token by token.

Each head has a state S [K, V]. A token with query q (C in the paper), key k (B), value v (Δ·x) and decay α = exp(g),
g = Δ·A, changes it and reads it:

    S ← α·S + k·vᵀ        o = Sᵀ·q

In a chunk, outputs are causal attention without a softmax, whose weights (q_i·k_j) decay from token j to token i, plus
what the queries read of the state before the chunk.

B sequences of N tokens, G groups of J heads each, K numbers of a state for each of V features of a value. The heads of
a group share queries and keys. A sequence may have several documents, of which each begins with a state of 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config.attention_kernels import STATE_CHUNK
from moe_jax.models.attention.state_scan import decays_of, scan_chunks, scan_tokens

State = Float[Array, "B G J K V"]


class Tokens(NamedTuple):
    """What the tokens do to the states of their heads, in float32."""

    query_BNGK: Float[Array, "B N G K"]
    key_BNGK: Float[Array, "B N G K"]
    value_BNGJV: Float[Array, "B N G J V"]
    log_decay_BNGJ: Float[Array, "B N G J"]  # g, at most 0
    document_BN: Int[Array, "B N"]  # numbers of the tokens' documents


def first_state(tokens: Tokens) -> State:
    """Return the state before the first token."""
    batch, _, groups, keys = tokens.key_BNGK.shape
    return jnp.zeros((batch, groups, tokens.value_BNGJV.shape[3], keys, tokens.value_BNGJV.shape[4]))


def token_by_token(tokens: Tokens, state: State, document_B: Int[Array, " B"]) -> tuple[jax.Array, State]:
    """Return the outputs [B, N, G, J, V] and the state after the last token, by the definition.

    `document_B` is the document of the token before the first one.
    """

    def step(state: State, token: Tokens) -> tuple[State, jax.Array]:
        query_BGK, key_BGK, value_BGJV, log_decay_BGJ, _ = token
        state = state * jnp.exp(log_decay_BGJ)[..., None, None] + jnp.einsum("bgk,bgjv->bgjkv", key_BGK, value_BGJV)
        return state, jnp.einsum("bgjkv,bgk->bgjv", state, query_BGK)

    return scan_tokens(step, tokens, state, document_B)


def in_chunks(
    tokens: Tokens, state: State, document_B: Int[Array, " B"], chunk: int = STATE_CHUNK
) -> tuple[jax.Array, State]:
    """Return the same as `token_by_token`, with matrix products over chunks of tokens."""
    return scan_chunks(_through_chunk, tokens, state, document_B, chunk)


def _through_chunk(state: State, tokens: Tokens, before_B: Int[Array, " B"]) -> tuple[State, jax.Array]:
    """Return the state after a chunk, and the outputs [B, C, G, J, V]."""
    query, key, value, log_decay, document_BC = tokens
    decays = decays_of(log_decay, document_BC, before_B)
    value_BGJCV = jnp.moveaxis(value, 1, 3)
    weight_BGJCC = jnp.einsum("bcgk,bdgk->bgcd", query, key)[:, :, None] * decays.between_BGJCC
    old_BGJCV = decays.from_before_BGJC[..., None] * jnp.einsum("bcgk,bgjkv->bgjcv", query, state)
    out_BGJCV = old_BGJCV + weight_BGJCC @ value_BGJCV
    state = decays.from_before_BGJC[..., -1, None, None] * state
    state += jnp.einsum("bcgk,bgjcv->bgjkv", key, decays.to_end_BGJC[..., None] * value_BGJCV)
    return state, jnp.moveaxis(out_BGJCV, 3, 1)
