"""Ragged (variable-split) dispatch: the rows that found a slot, sorted by expert, sent with their sizes (Lancet).

P expert ranks, L experts on each, E = P·L; S rows sent at most; T tokens of this part; D model width.
The experts see lanes as wide as their share of all slots (see `all_to_all.ragged`): more rows than that are rare, and
take a second, smaller product.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models import routing
from moe_jax.models.dispatchers.protocol import CapacityState, ExpertRows, RowSource, TopKMetadata
from moe_jax.models.expert_matmuls import as_experts_multiply
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.layers import EACH, ONE, mlp
from moe_jax.parallel.all_to_all.ragged import Lanes, Widths, overflows
from moe_jax.parallel.trees import Grads, Params

_TILE = 8  # rows that hardware handles at once


def permute(
    x_TD: Float[Array, "T D"], choice: TopKRouting, moe: MoEConfig, ep_size: int, capacity: CapacityState
) -> tuple[ExpertRows, TopKMetadata]:
    """The rows that found a slot [S, …], sorted by expert, how many each expert gets [E], and what they are made of."""
    count_E = choice.tokens_per_expert()
    rank_Tk = routing.queue_positions(choice, count_E)
    keep_mask_Tk = capacity.used_E[choice.expert_Tk] + rank_Tk < capacity.slots
    kept_E = jnp.clip(capacity.slots - capacity.used_E, 0, count_E)
    start_E = jnp.cumsum(kept_E) - kept_E
    dest_index_Tk = start_E[choice.expert_Tk] + rank_Tk
    permutation = routing.make_permutation(dest_index_Tk, keep_mask_Tk, choice.expert_Tk.size)
    num_dropped = count_E.sum() - keep_mask_Tk.sum()
    rows_S = RowSource(x_TD, permutation).gather()
    source = RowSource(jax.lax.stop_gradient(x_TD), permutation)
    return ExpertRows(rows_S, kept_E, source), TopKMetadata(permutation, choice.weight_Tk, num_dropped)


def unpermute(returned_S: Float[Array, "S ..."], metadata: TopKMetadata) -> Float[Array, "T D"]:
    """Weighted sums of each token's rows."""
    y_T = routing.from_rows(returned_S, metadata.weight_Tk, metadata.permutation)
    return y_T.reshape(len(y_T), math.prod(y_T.shape[1:]))


def lane_widths(slots: int, parts: int, tokens: int, ep_size: int) -> Widths:
    """Widths of the lanes for a part of `tokens` tokens, of `parts`: its share of an expert's slots, and what is left
    of the most rows that there can be.
    """
    share = -(-slots * ep_size // (parts * _TILE)) * _TILE
    most = ep_size * min(slots, tokens)
    return Widths(min(share, most), max(most - share, 0))


def lane_experts(
    params: Params, main_LbD: Float[Array, "L b D"], filled_L: Int[Array, " L"], moe: MoEConfig
) -> Float[Array, "L b D"]:
    """Each expert on the rows that found room in its lane."""
    return _real_back(mlp(params, _real(main_LbD, filled_L), as_experts_multiply(EACH, moe)), filled_L)


class Stored(NamedTuple):
    """The weights of a block's experts where they lie, so that what is not used now is not copied."""

    stack: Params  # leaves [periods, L, …]
    period: int

    def cast(self, x: jax.Array) -> Params:
        """Those of all experts [L, …] in the type of `x`, made as soon as `x` exists and not before."""
        period, _ = jax.lax.optimization_barrier((jnp.int32(self.period), x))

        def taken(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, period, keepdims=False).astype(x.dtype)

        # with a barrier: XLA:TPU would take the block out once more in every product
        return jax.lax.optimization_barrier(jax.tree.map(taken, self.stack))

    def of(self, expert: jax.Array) -> Params:
        """Those of one expert."""

        def taken(leaf: jax.Array) -> jax.Array:
            start: list[int | jax.Array] = [self.period, expert, *[0] * (leaf.ndim - 2)]
            one = jax.lax.dynamic_slice(leaf, start, (1, 1, *leaf.shape[2:])).reshape(leaf.shape[2:])
            return jax.lax.bitcast_convert_type(one, f"uint{8 * leaf.dtype.itemsize}")

        # As bits: XLA:TPU would keep a copy of all weights in bfloat16 if it knew that they are only used as such.
        # With a barrier: it would change all weights' layout in front of the loop, and that of what it makes behind it.
        bits = jax.lax.optimization_barrier(jax.tree.map(taken, self.stack))
        return jax.tree.map(lambda one, leaf: jax.lax.bitcast_convert_type(one, leaf.dtype), bits, self.stack)


class Overflow(NamedTuple):
    """Rows that found no room in their expert's lane, with products of their own.

    Only the last block keeps them for the backward pass, which comes next: room for all that can be is a lot of memory
    for what is nearly never there. Those of other blocks are sent a second time. A loop takes one expert after another,
    so that its buffers are small.
    """

    source: RowSource
    count_PE: Int[Array, "P E"]
    filled_L: Int[Array, " L"]
    happened: Bool[Array, ""]

    @classmethod
    def of(cls, source: RowSource, lanes: Lanes, filled_L: Int[Array, " L"]) -> "Overflow":
        """Of a rank's lanes, with so many rows in them."""
        return cls(source, lanes.count_PE, filled_L, overflows(lanes.count_PE, lanes.main_LbD.shape[1]))

    def sent(self) -> jax.Array:
        """What was sent, [S, …]; anything if nothing overflows."""
        shape = jax.eval_shape(self.source.gather)
        with jax.named_scope("overflow"):
            return jax.lax.cond(self.happened, self.source.gather, lambda: jax.lax.empty(shape.shape, shape.dtype))

    def forward(self, weights: Stored, rest: "Rest", moe: MoEConfig) -> jax.Array:
        """What the experts make of these rows."""

        def turn(expert: jax.Array, out_R: jax.Array) -> jax.Array:
            lane = self._lane(rest.rows_R, expert, rest.main)
            return self._put(out_R, expert, _expert(weights.of(expert), lane, moe))

        return self._rows(turn, rest.rows_R)

    def backward(self, weights: Stored, rest: "Rest", d_out: jax.Array, moe: MoEConfig) -> jax.Array:
        """The rows' gradient."""

        def turn(expert: jax.Array, d_rest_R: jax.Array) -> jax.Array:
            return self._put(d_rest_R, expert, self._pull(weights, expert, rest, d_out, moe)[1])

        return self._rows(turn, rest.rows_R)

    def add_weights(self, gradient: Grads, weights: Stored, rest: "Rest", d_out: jax.Array, moe: MoEConfig) -> Grads:
        """Gradients of the experts' weights [L, …] with these rows' part."""

        def turn(expert: jax.Array, gradient: Grads) -> Grads:
            new = self._pull(weights, expert, rest, d_out, moe)[0]
            return jax.tree.map(lambda leaf, more: leaf.at[expert].add(more), gradient, new)

        # no branch: it would copy the gradients even if nothing overflows
        with jax.named_scope("overflow"):
            return jax.lax.fori_loop(0, jnp.where(self.happened, len(self.filled_L), 0), turn, gradient)

    def _rows(self, turn: Callable[[jax.Array, jax.Array], jax.Array], like_R: jax.Array) -> jax.Array:
        """Rows that a loop makes; anything if nothing overflows."""

        def nothing() -> jax.Array:
            return jax.lax.empty(like_R.shape, like_R.dtype)

        # a branch, because XLA:TPU believes that a loop takes long, and that it hides collectives
        with jax.named_scope("overflow"):
            return jax.lax.cond(
                self.happened, lambda: jax.lax.fori_loop(0, len(self.filled_L), turn, nothing()), nothing
            )

    def _lane(self, rows_R: jax.Array, expert: jax.Array, main: int) -> jax.Array:
        """The rows of one expert [w, D]; 0 for those that do not exist."""
        width = len(rows_R) // len(self.filled_L)
        rows = jax.lax.dynamic_slice_in_dim(rows_R, expert * width, width)
        exists = main + jnp.arange(width) < self.filled_L[expert]
        return jnp.where(exists[:, None], rows.reshape(width, math.prod(rows_R.shape[1:])), 0)

    def _put(self, rows_R: jax.Array, expert: jax.Array, lane: jax.Array) -> jax.Array:
        lane = lane.reshape(len(lane), *rows_R.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(rows_R, lane, expert * len(lane), axis=0)

    def _pull(
        self, weights: Stored, expert: jax.Array, rest: "Rest", d_out: jax.Array, moe: MoEConfig
    ) -> tuple[Grads, jax.Array]:
        rows, d_lane = self._lane(rest.rows_R, expert, rest.main), self._lane(d_out, expert, rest.main)
        return jax.vjp(partial(_expert, moe=moe), weights.of(expert), rows)[1](d_lane)


def _expert(params: Params, lane: jax.Array, moe: MoEConfig) -> jax.Array:
    return mlp(params, lane, as_experts_multiply(ONE, moe))


class Rest(NamedTuple):
    """Rows beyond the first `main` of each lane, as they arrived."""

    rows_R: Float[Array, "R ..."]
    main: int


def _real(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """The rows that exist; 0 for the others."""
    return jnp.where((jnp.arange(rows_LRD.shape[1]) < filled_L[:, None])[..., None], rows_LRD, 0)


@jax.custom_vjp
def _real_back(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """The same rows; backward, cotangents of rows that do not exist are 0."""
    return rows_LRD


_real_back.defvjp(lambda rows, filled: (rows, filled), lambda filled, d_rows: (_real(d_rows, filled), None))
