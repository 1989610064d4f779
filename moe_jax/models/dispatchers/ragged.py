"""Ragged (variable-split) dispatch: the rows that found a slot, sorted by expert, are sent with their sizes (Lancet).

P expert ranks, L experts on each, E = P·L; at most S rows sent; T tokens of this part; D model width. On the experts'
side each lane is as wide as the part's share of all slots (see `all_to_all.ragged`). More rows than that are rare, and
go through a second, smaller product.
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
from moe_jax.models.expert_matmuls import expert_product
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.layers import EACH, ONE, mlp
from moe_jax.parallel.all_to_all.ragged import Lanes, Widths, overflows
from moe_jax.parallel.trees import Grads, Params, Tree

_TILE = 8  # rows that hardware handles at once


def permute(
    x_TD: Float[Array, "T D"], choice: TopKRouting, moe: MoEConfig, ep_size: int, capacity: CapacityState
) -> tuple[ExpertRows, TopKMetadata]:
    """Return the rows that found a slot [S, …], sorted by expert, how many each expert gets [E], and their source."""
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
    """Return weighted sums of each token's rows."""
    y_T = routing.from_rows(returned_S, metadata.weight_Tk, metadata.permutation)
    return y_T.reshape(len(y_T), math.prod(y_T.shape[1:]))


def lane_widths(slots: int, parts: int, tokens: int, ep_size: int) -> Widths:
    """Return the widths of the lanes for a part of `tokens` tokens, one of `parts`.

    The main width is the part's share of an expert's slots; the rest is what remains of the largest possible number of
    rows.
    """
    share = -(-slots * ep_size // (parts * _TILE)) * _TILE
    most = ep_size * min(slots, tokens)
    return Widths(min(share, most), max(most - share, 0))


def lane_experts(
    params: Params, main_LbD: Float[Array, "L b D"], filled_L: Int[Array, " L"], moe: MoEConfig
) -> Float[Array, "L b D"]:
    """Apply each expert to the rows in the main part of its lane."""
    return _mask_empty_gradients(mlp(params, _mask_empty(main_LbD, filled_L), expert_product(EACH, moe)), filled_L)


class Stored(NamedTuple):
    """The weights of a block's experts in the stack of all periods.

    Weights that are not used yet are not copied out of it.
    """

    stack: Params  # leaves [periods, L, …]
    period: int

    def cast(self, x: jax.Array) -> Params:
        """Return the weights of all experts [L, …] in the dtype of `x`.

        They are cast as soon as `x` exists and not before.
        """
        period, _ = jax.lax.optimization_barrier((jnp.int32(self.period), x))

        def slice_leaf(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, period, keepdims=False).astype(x.dtype)

        # with a barrier: XLA:TPU would slice the block out of the stack again in every product
        return jax.lax.optimization_barrier(jax.tree.map(slice_leaf, self.stack))

    def of(self, expert: jax.Array) -> Params:
        """Return the weights of one expert."""

        stack = _only_with(expert, jax.tree.leaves(self.stack)[0].shape[1], self.stack)

        def slice_leaf(leaf: jax.Array) -> jax.Array:
            start: list[int | jax.Array] = [self.period, expert, *[0] * (leaf.ndim - 2)]
            one = jax.lax.dynamic_slice(leaf, start, (1, 1, *leaf.shape[2:])).reshape(leaf.shape[2:])
            return jax.lax.bitcast_convert_type(one, f"uint{8 * leaf.dtype.itemsize}")

        # As bits: XLA:TPU would store a copy of all weights in bfloat16 if it knew that they are only used as such.
        # With a barrier: it would change the layout of all weights before the loop, and of its results after it.
        bits = jax.lax.optimization_barrier(jax.tree.map(slice_leaf, stack))
        return jax.tree.map(lambda one, leaf: jax.lax.bitcast_convert_type(one, leaf.dtype), bits, stack)


def _only_with(expert: jax.Array, experts: int, tree: Tree) -> Tree:
    """Return the arrays, tied to the number of an expert in a loop over `experts` if there is only one.

    Otherwise nothing in the loop would depend on the loop, and XLA would compute all of it before the loop, even if the
    loop does not run.
    """
    return tree if experts > 1 else jax.lax.optimization_barrier((tree, expert))[0]


class Overflow(NamedTuple):
    """Rows that do not fit in the main part of their expert's lane. They have products of their own.

    Only the last block stores them for the backward pass, which comes next: memory for all possible overflow rows is
    large, and there are nearly never any. Those of other blocks are sent a second time. A loop processes one expert
    after another, so that its buffers are small.
    """

    source: RowSource
    count_PE: Int[Array, "P E"]
    filled_L: Int[Array, " L"]
    happened: Bool[Array, ""]

    @classmethod
    def of(cls, source: RowSource, lanes: Lanes, filled_L: Int[Array, " L"]) -> "Overflow":
        """Return the overflow of the lanes of a rank, which have `filled_L` rows."""
        return cls(source, lanes.count_PE, filled_L, overflows(lanes.count_PE, lanes.main_LbD.shape[1]))

    def sent(self) -> jax.Array:
        """Return the rows that were sent, [S, …]; arbitrary if nothing overflows."""
        shape = jax.eval_shape(self.source.gather)
        with jax.named_scope("overflow"):
            return jax.lax.cond(self.happened, self.source.gather, lambda: jax.lax.empty(shape.shape, shape.dtype))

    def forward(self, weights: Stored, rest: "Rest", moe: MoEConfig) -> jax.Array:
        """Return the outputs of the experts for these rows."""

        def body(expert: jax.Array, out_R: jax.Array) -> jax.Array:
            lane = self._lane(rest.rows_R, expert, rest.main)
            return self._write_lane(out_R, expert, _expert(weights.of(expert), lane, moe))

        return self._loop(body, rest.rows_R)

    def backward(self, weights: Stored, rest: "Rest", d_out: jax.Array, moe: MoEConfig) -> jax.Array:
        """Return the gradient of these rows."""

        def body(expert: jax.Array, d_rest_R: jax.Array) -> jax.Array:
            return self._write_lane(d_rest_R, expert, self._gradients(weights, expert, rest, d_out, moe)[1])

        return self._loop(body, rest.rows_R)

    def add_weights(self, gradient: Grads, weights: Stored, rest: "Rest", d_out: jax.Array, moe: MoEConfig) -> Grads:
        """Add the contribution of these rows to the gradients of the experts' weights [L, …]."""

        def body(expert: jax.Array, gradient: Grads) -> Grads:
            new = self._gradients(weights, expert, rest, d_out, moe)[0]
            return jax.tree.map(lambda leaf, more: leaf.at[expert].add(more), gradient, new)

        # no branch: it would copy the gradients even if nothing overflows
        with jax.named_scope("overflow"):
            return jax.lax.fori_loop(0, jnp.where(self.happened, len(self.filled_L), 0), body, gradient)

    def _loop(self, body: Callable[[jax.Array, jax.Array], jax.Array], like_R: jax.Array) -> jax.Array:
        """Return rows that a loop over experts computes; arbitrary if nothing overflows."""

        def empty() -> jax.Array:
            return jax.lax.empty(like_R.shape, like_R.dtype)

        # a branch, because XLA:TPU assumes that a loop takes long, and overlaps collectives with it
        with jax.named_scope("overflow"):
            return jax.lax.cond(self.happened, lambda: jax.lax.fori_loop(0, len(self.filled_L), body, empty()), empty)

    def _lane(self, rows_R: jax.Array, expert: jax.Array, main: int) -> jax.Array:
        """Return the rows of one expert [w, D], with 0 for those that do not exist."""
        rows_R = _only_with(expert, len(self.filled_L), rows_R)
        width = len(rows_R) // len(self.filled_L)
        rows = jax.lax.dynamic_slice_in_dim(rows_R, expert * width, width)
        exists = main + jnp.arange(width) < self.filled_L[expert]
        return jnp.where(exists[:, None], rows.reshape(width, math.prod(rows_R.shape[1:])), 0)

    def _write_lane(self, rows_R: jax.Array, expert: jax.Array, lane: jax.Array) -> jax.Array:
        lane = lane.reshape(len(lane), *rows_R.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(rows_R, lane, expert * len(lane), axis=0)

    def _gradients(
        self, weights: Stored, expert: jax.Array, rest: "Rest", d_out: jax.Array, moe: MoEConfig
    ) -> tuple[Grads, jax.Array]:
        rows, d_lane = self._lane(rest.rows_R, expert, rest.main), self._lane(d_out, expert, rest.main)
        return jax.vjp(partial(_expert, moe=moe), weights.of(expert), rows)[1](d_lane)


def _expert(params: Params, lane: jax.Array, moe: MoEConfig) -> jax.Array:
    return mlp(params, lane, expert_product(ONE, moe))


class Rest(NamedTuple):
    """Rows beyond the first `main` of each lane, as they arrived."""

    rows_R: Float[Array, "R ..."]
    main: int


def _mask_empty(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """Set rows that do not exist to 0."""
    return jnp.where((jnp.arange(rows_LRD.shape[1]) < filled_L[:, None])[..., None], rows_LRD, 0)


@jax.custom_vjp
def _mask_empty_gradients(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """Return the rows unchanged. In the backward pass, set cotangents of rows that do not exist to 0."""
    return rows_LRD


_mask_empty_gradients.defvjp(
    lambda rows, filled: (rows, filled), lambda filled, d_rows: (_mask_empty(d_rows, filled), None)
)
