"""Maps between (token, choice) pairs and rows that can be sent.

T tokens of this device, k choices of each, E experts, R rows of the send buffer, D model width. A (token, choice) pair
has a rank among its expert's pairs, in token order, which determines its row. Both directions are gathers, forward and
backward: scattering rows is slow on every platform.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import TopKRouting

_LAST = 2**30  # after all slots


def expert_capacity(moe: MoEConfig, tokens: int) -> int:
    """Return C = ceil(f·k·T/E) slots per expert on each source device; T when dropless. It is never above T."""
    if moe.capacity_factor is None:
        return tokens
    factor = Fraction(str(moe.capacity_factor))  # as written: 1.1 · 100 / 10 is 11 slots, not 12
    return min(tokens, math.ceil(factor * moe.top_k * tokens / moe.num_experts))


def rank_in_expert(expert_Tk: Int[Array, "T k"], count_E: Int[Array, " E"]) -> Int[Array, "T k"]:
    """Return the place of each pair among the pairs of its expert, in the order of tokens, then choices."""
    flat = expert_Tk.ravel()
    order = jnp.argsort(flat, stable=True)
    start_E = jnp.cumsum(count_E) - count_E
    rank_in_order = jnp.arange(flat.size, dtype=jnp.int32) - start_E[flat[order]]
    return jnp.zeros_like(flat).at[order].set(rank_in_order, unique_indices=True).reshape(expert_Tk.shape)


def queue_positions(choice: TopKRouting, count_E: Int[Array, " E"]) -> Int[Array, "T k"]:
    """Return the place of each pair in the queue for its expert's slots.

    A choice without an expert is placed after all slots.
    """
    expert_Tk, priority_T = choice.expert_Tk, choice.priority_T
    if priority_T is None:
        rank_Tk = rank_in_expert(expert_Tk, count_E)
    else:
        token_T = jnp.argsort(-priority_T, stable=True)
        position_Tk = rank_in_expert(expert_Tk[token_T], count_E)
        rank_Tk = jnp.zeros_like(position_Tk).at[token_T].set(position_Tk, unique_indices=True)
    return jnp.where(expert_Tk < len(count_E), rank_Tk, _LAST)


class TokenPermutation(NamedTuple):
    """A one-to-one map between (token, choice) pairs that are not dropped and rows of a buffer."""

    dest_index_Tk: Int[Array, "T k"]  # the row of each pair; R: dropped
    token_R: Int[Array, " R"]  # the token of each row; T: an empty row


def make_permutation(
    dest_index_Tk: Int[Array, "T k"], keep_mask_Tk: Bool[Array, "T k"], num_rows: int
) -> TokenPermutation:
    """Return the map that puts each pair of `keep_mask_Tk` into its row."""
    tokens, choices = dest_index_Tk.shape
    dest_index_Tk = jnp.where(keep_mask_Tk, dest_index_Tk, num_rows)
    token_Tk = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, choices))
    token_R = jnp.full(num_rows, tokens, jnp.int32).at[dest_index_Tk.ravel()].set(token_Tk.ravel(), mode="drop")
    return TokenPermutation(dest_index_Tk, token_R)


def inverse(permutation: TokenPermutation) -> TokenPermutation:
    """Return the inverse map, from rows to tokens, where each token has one choice."""
    return TokenPermutation(permutation.token_R[:, None], permutation.dest_index_Tk[:, 0])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    # no index is negative; the constants that wrapping needs make XLA:GPU fuse two microbatches into one operation
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@jax.custom_vjp
def to_rows(x_T: Float[Array, "T ..."], permutation: TokenPermutation) -> Float[Array, "R ..."]:
    """Copy each token into the rows of its choices that are not dropped. Empty rows are 0."""
    return _take(x_T, permutation.token_R)


def _to_rows_forward(x_T: jax.Array, permutation: TokenPermutation) -> tuple[jax.Array, TokenPermutation]:
    return to_rows(x_T, permutation), permutation


def _to_rows_backward(permutation: TokenPermutation, dy_R: jax.Array) -> tuple[jax.Array, None]:
    choices = permutation.dest_index_Tk.shape[1]
    return sum(_take(dy_R, permutation.dest_index_Tk[:, j]) for j in range(choices)), None  # type: ignore[return-value]


to_rows.defvjp(_to_rows_forward, _to_rows_backward)


@jax.custom_vjp
def from_rows(
    y_R: Float[Array, "R ..."], weight_Tk: Float[Array, "T k"], permutation: TokenPermutation
) -> Float[Array, "T ..."]:
    """Return the sum of weight · row over the choices of each token that are not dropped, accumulated in float32."""
    tokens, choices = permutation.dest_index_Tk.shape
    total_T = jnp.zeros((tokens, *y_R.shape[1:]), jnp.float32)
    for j in range(choices):
        total_T += _per_row(weight_Tk[:, j], y_R) * _take(y_R, permutation.dest_index_Tk[:, j])
    return total_T.astype(y_R.dtype)


def _per_row(factor: jax.Array, rows: jax.Array) -> jax.Array:
    """Reshape one factor per row, to be multiplied with rows like these."""
    return factor.reshape(-1, *(1,) * (rows.ndim - 1))


class _Saved(NamedTuple):
    """What the backward pass of `from_rows` reads."""

    y_R: jax.Array
    weight_Tk: jax.Array
    permutation: TokenPermutation


def _from_rows_forward(y_R: jax.Array, weight_Tk: jax.Array, permutation: TokenPermutation) -> tuple[jax.Array, _Saved]:
    return from_rows(y_R, weight_Tk, permutation), _Saved(y_R, weight_Tk, permutation)


def _from_rows_backward(saved: _Saved, dout_T: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    y_R, weight_Tk, (dest_index_Tk, token_R) = saved
    weight_R = jnp.zeros(len(y_R), weight_Tk.dtype).at[dest_index_Tk.ravel()].set(weight_Tk.ravel(), mode="drop")
    dy_R = (_per_row(weight_R, y_R) * _take(dout_T, token_R)).astype(y_R.dtype)
    wide_T, features = dout_T.astype(jnp.float32), tuple(range(1, y_R.ndim))
    dweight_Tk = jnp.stack(
        [jnp.sum(wide_T * _take(y_R, dest_index_Tk[:, j]), axis=features) for j in range(weight_Tk.shape[1])], axis=1
    )
    return dy_R, dweight_Tk.astype(weight_Tk.dtype), None


from_rows.defvjp(_from_rows_forward, _from_rows_backward)
