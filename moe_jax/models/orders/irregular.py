"""Capacity without padding: the rows that found a slot, sorted by expert, sent with their sizes (Lancet).

P expert ranks, L experts on each, E = P·L; S rows sent at most; T tokens of this part; D model width.
The experts see lanes as wide as their share of all slots (see `all_to_all.ragged`): more rows than that are rare, and
take a second, smaller product.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import MoE
from moe_jax.models import routing
from moe_jax.models.gates.choice import Choice
from moe_jax.models.layers import mlp
from moe_jax.models.orders.protocol import Room, Ticket
from moe_jax.parallel.all_to_all.ragged import Lanes, Widths, filled, row_shape
from moe_jax.parallel.mesh import Axis

_TILE = 8  # rows that hardware handles at once


class Sent(NamedTuple):
    """What a part of the batch sends."""

    rows_S: Float[Array, "S ..."]  # D features in the shape of `row_shape`
    count_E: Int[Array, " E"]


def order(x_TD: Float[Array, "T D"], choice: Choice, moe: MoE, ranks: int, room: Room) -> tuple[Sent, Ticket]:
    """The rows that found a slot, sorted by expert, and how many each expert gets."""
    count_E = routing.expert_counts(choice.expert_Tk, moe.num_experts)
    rank_Tk = routing.rank_in_expert(choice.expert_Tk, count_E)
    kept_Tk = room.used_E[choice.expert_Tk] + rank_Tk < room.slots
    kept_E = jnp.clip(room.slots - room.used_E, 0, count_E)
    start_E = jnp.cumsum(kept_E) - kept_E
    rows = routing.assign_rows(start_E[choice.expert_Tk] + rank_Tk, kept_Tk, choice.expert_Tk.size)
    ticket = Ticket(rows=rows, weight_Tk=choice.weight_Tk, num_dropped=jnp.sum(~kept_Tk))
    rows_S = routing.to_rows(x_TD.reshape(-1, *row_shape(x_TD.shape[1])), rows)
    return Sent(rows_S, kept_E), ticket


def inverse(returned_S: Float[Array, "S ..."], ticket: Ticket) -> Float[Array, "T D"]:
    """Weighted sums of each token's rows."""
    y_T = routing.from_rows(returned_S, ticket.weight_Tk, ticket.rows)
    return y_T.reshape(len(y_T), -1)


def lane_widths(room: Room, tokens: int, ranks: int) -> Widths:
    """Of the lanes for a part of `tokens` tokens: its share of an expert's slots, and the most there can be."""
    share = -(-room.slots * ranks // (room.parts * _TILE)) * _TILE
    most = ranks * min(room.slots, tokens)
    return Widths(min(share, most), max(most - share, 0))


def experts(params: Any, main_LbD: Float[Array, "L b D"], filled_L: Int[Array, " L"]) -> Float[Array, "L b D"]:
    """Each expert on the rows that found room in its lane."""
    return _real_back(_product(params, _real(main_LbD, filled_L)), filled_L)


class Overflow(NamedTuple):
    """Rows that found no room in their expert's lane, with products of their own. `main`: rows of a lane.

    A loop over experts, of no turn if nothing overflows: its buffers are those of one expert, what it changes it
    changes in place, and what it reads is not copied. None of that holds for a branch.
    """

    rest_R: Float[Array, "R ..."]
    filled_L: Int[Array, " L"]
    happened: Bool[Array, ""]

    @classmethod
    def of(cls, lanes: Lanes) -> "Overflow":
        """Of a rank's lanes."""
        # of any rank: all take the same way
        happened = lanes.count_PE.sum(axis=0).max() > lanes.main_LbD.shape[1]
        return cls(lanes.rest_R, filled(lanes.count_PE, Axis.EXPERT), happened)

    def forward(self, params: Any, main: int) -> jax.Array:
        """What the experts make of these rows."""

        def turn(expert: jax.Array, out_R: jax.Array) -> jax.Array:
            return self._put(out_R, expert, mlp(self._of(params, expert), self._lane(self.rest_R, expert, main)))

        return self._each_expert(turn, self._nothing())

    def backward(self, params: Any, d_out: jax.Array, main: int) -> jax.Array:
        """The rows' gradient."""

        def turn(expert: jax.Array, d_rest_R: jax.Array) -> jax.Array:
            return self._put(d_rest_R, expert, self._pull(params, expert, d_out, main)[1])

        return self._each_expert(turn, self._nothing())

    def add_weights(self, gradient: Any, params: Any, d_out: jax.Array, main: int) -> Any:
        """Gradients of the experts' weights [L, …] with these rows' part."""

        def turn(expert: jax.Array, gradient: Any) -> Any:
            new = self._pull(params, expert, d_out, main)[0]
            return jax.tree.map(lambda leaf, more: leaf.at[expert].add(more), gradient, new)

        return self._each_expert(turn, gradient)

    def _each_expert(self, turn: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        with jax.named_scope("overflow"):
            return jax.lax.fori_loop(0, jnp.where(self.happened, len(self.filled_L), 0), turn, carry)

    def _nothing(self) -> jax.Array:
        return jax.lax.empty(self.rest_R.shape, self.rest_R.dtype)  # where nothing overflows, nobody reads these rows

    def _of(self, params: Any, expert: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), params)

    def _width(self) -> int:
        return len(self.rest_R) // len(self.filled_L)

    def _lane(self, rows_R: jax.Array, expert: jax.Array, main: int) -> jax.Array:
        """The rows of one expert [w, D]; 0 for those that do not exist."""
        width = self._width()
        rows = jax.lax.dynamic_slice_in_dim(rows_R, expert * width, width)
        exists = main + jnp.arange(width) < self.filled_L[expert]
        return jnp.where(exists[:, None], rows.reshape(width, math.prod(rows_R.shape[1:])), 0)

    def _put(self, rows_R: jax.Array, expert: jax.Array, lane: jax.Array) -> jax.Array:
        width = self._width()
        lane = lane.reshape(width, *rows_R.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(rows_R, lane, expert * width, axis=0)

    def _pull(self, params: Any, expert: jax.Array, d_out: jax.Array, main: int) -> Any:
        rows, d_lane = self._lane(self.rest_R, expert, main), self._lane(d_out, expert, main)
        return jax.vjp(mlp, self._of(params, expert), rows)[1](d_lane)


def _product(params: Any, rows_LRD: jax.Array) -> jax.Array:
    return mlp(params, rows_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)))


def _real(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """The rows that exist; 0 for the others."""
    return jnp.where((jnp.arange(rows_LRD.shape[1]) < filled_L[:, None])[..., None], rows_LRD, 0)


@jax.custom_vjp
def _real_back(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """The same rows; backward, cotangents of rows that do not exist are 0."""
    return rows_LRD


_real_back.defvjp(lambda rows, filled: (rows, filled), lambda filled, d_rows: (_real(d_rows, filled), None))
