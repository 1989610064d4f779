"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", eq. 10), in chunks and token by token.

Each head has a state S [K, V] that maps keys to values. A token with query q, key k, value v, decay α = exp(g) and rate
β changes it and reads it:

    S ← α·S + k·(β·(v − α·Sᵀ·k))ᵀ        o = Sᵀ·q

In a chunk of tokens, let G be the sum of g from its first token on, A_ij = β_i·(k_i·k_j)·exp(G_i − G_j) for j < i and 0
otherwise. Then (I + A)·U = β·(V − exp(G)·K·S) are the corrections of all its tokens, from the state S before it (their
WY representation, section 3.3), and the outputs are exp(G)·Q·S plus causal attention without a softmax.

B sequences of N tokens, G key heads with J value heads each, K and V widths of keys and values; C tokens of a chunk. A
sequence may have several documents, of which each begins with a state of 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    rate_BNGJ: Float[Array, "B N G J"]  # β, between 0 and 1
    document_BN: Int[Array, "B N"]  # numbers of the tokens' documents


def first_state(tokens: Tokens) -> State:
    """Return the state before the first token."""
    batch, _, groups, key_width = tokens.key_BNGK.shape
    return jnp.zeros((batch, groups, *tokens.value_BNGJV.shape[3:4], key_width, tokens.value_BNGJV.shape[4]))


def token_by_token(tokens: Tokens, state: State, document_B: Int[Array, " B"]) -> tuple[jax.Array, State]:
    """Return the outputs [B, N, G, J, V] and the state after the last token, by the definition.

    `document_B` is the document of the token before the first one.
    """

    def step(state: State, token: Tokens) -> tuple[State, jax.Array]:
        query_BGK, key_BGK, value_BGJV, log_decay_BGJ, rate_BGJ, _ = token
        state = state * jnp.exp(log_decay_BGJ)[..., None, None]
        known_BGJV = jnp.einsum("bgjkv,bgk->bgjv", state, key_BGK)
        correction_BGJV = rate_BGJ[..., None] * (value_BGJV - known_BGJV)
        state = state + jnp.einsum("bgk,bgjv->bgjkv", key_BGK, correction_BGJV)
        return state, jnp.einsum("bgjkv,bgk->bgjv", state, query_BGK)

    return scan_tokens(step, tokens, state, document_B)


def in_chunks(
    tokens: Tokens, state: State, document_B: Int[Array, " B"], chunk: int = STATE_CHUNK
) -> tuple[jax.Array, State]:
    """Return the same as `token_by_token`, with matrix products over chunks of tokens."""
    return scan_chunks(_through_chunk, tokens, state, document_B, chunk)


def _through_chunk(state: State, tokens: Tokens, before_B: Int[Array, " B"]) -> tuple[State, jax.Array]:
    """Return the state after a chunk, and the outputs [B, C, G, J, V]."""
    query, key, value, log_decay, rate_BCGJ, document_BC = tokens
    decay_BGJCC, from_before_BGJC, to_end_BGJC = decays_of(log_decay, document_BC, before_B)
    rate_BGJC = jnp.moveaxis(rate_BCGJ, 1, 3)

    product_BGCC = jnp.einsum("bcgk,bdgk->bgcd", key, key)
    system_BGJCC = rate_BGJC[..., None] * product_BGCC[:, :, None] * decay_BGJCC  # I + A but for its diagonal
    known_BGJCV = from_before_BGJC[..., None] * jnp.einsum("bcgk,bgjkv->bgjcv", key, state)
    wrong_BGJCV = rate_BGJC[..., None] * (jnp.moveaxis(value, 1, 3) - known_BGJCV)
    correction_BGJCV = solve_unit_lower(system_BGJCC, wrong_BGJCV)

    weight_BGJCC = jnp.einsum("bcgk,bdgk->bgcd", query, key)[:, :, None] * decay_BGJCC
    old_BGJCV = from_before_BGJC[..., None] * jnp.einsum("bcgk,bgjkv->bgjcv", query, state)
    out_BGJCV = old_BGJCV + weight_BGJCC @ correction_BGJCV
    state = from_before_BGJC[..., -1, None, None] * state
    state += jnp.einsum("bcgk,bgjcv->bgjkv", key, to_end_BGJC[..., None] * correction_BGJCV)
    return state, jnp.moveaxis(out_BGJCV, 3, 1)


@jax.custom_vjp
def solve_unit_lower(a_CC: Float[Array, "*b C C"], y_CV: Float[Array, "*b C V"]) -> Float[Array, "*b C V"]:
    """Solve (I + L)·X = Y for X, where L is what A has below its diagonal, by matrix products alone."""
    return _inverse_unit_lower(a_CC) @ y_CV


def _inverse_unit_lower(a_CC: Float[Array, "*b C C"]) -> Float[Array, "*b C C"]:
    """Return (I + L)⁻¹, from the inverses of blocks on its diagonal: two neighbours P and Q with R below P have the
    inverse P⁻¹ and Q⁻¹ with −Q⁻¹·R·P⁻¹ below.
    """
    length, size = a_CC.shape[-1], 1
    row_C1, column_C = np.arange(length)[:, None], np.arange(length)
    inverse = jnp.broadcast_to(jnp.eye(length, dtype=a_CC.dtype), a_CC.shape)
    while size < length:
        neighbours = (row_C1 // (2 * size) == column_C // (2 * size)) & (row_C1 // size > column_C // size)
        between = jnp.where(neighbours, a_CC, 0)
        inverse = inverse - (between if size == 1 else _exact(_exact(inverse, between), inverse))
        size *= 2
    return inverse


def _exact(a_CC: jax.Array, b_CC: jax.Array) -> jax.Array:
    """Multiply in float32. TPUs and recent GPUs would round to bfloat16 or TF32, and an inverse adds up such errors."""
    return jnp.matmul(a_CC, b_CC, precision=jax.lax.Precision.HIGHEST)


def _solve_forward(a_CC: jax.Array, y_CV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _inverse_unit_lower(a_CC)
    x_CV = inverse @ y_CV
    return x_CV, (inverse, x_CV)


def _solve_backward(saved: tuple[jax.Array, jax.Array], dx_CV: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, x_CV = saved
    dy_CV = inverse.mT @ dx_CV
    return jnp.tril(-dy_CV @ x_CV.mT, -1), dy_CV


solve_unit_lower.defvjp(_solve_forward, _solve_backward)
