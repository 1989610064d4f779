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
from moe_jax.parallel.all_to_all.ragged import Lanes, Widths, filled, overflows, row_shape
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
    """Rows that found no room in their expert's lane: a second product, if there are any. `main`: rows of a lane."""

    params: Any
    rest_R: Float[Array, "R ..."]
    filled_L: Int[Array, " L"]
    happened: Bool[Array, ""]

    @classmethod
    def of(cls, params: Any, lanes: Lanes) -> "Overflow":
        """Of a rank's lanes."""
        happened = overflows(lanes.count_PE, lanes.main_LbD.shape[1])
        # as the product on the lanes has them: a branch would get copies of its own
        params = jax.tree.map(lambda w: w.astype(lanes.rest_R.dtype), params)
        return cls(params, lanes.rest_R, filled(lanes.count_PE, Axis.EXPERT), happened)

    def forward(self, main: int) -> jax.Array:
        """What the experts make of these rows."""
        return self._if(lambda: _product(self.params, self._lanes(self.rest_R, main)))

    def backward(self, d_out: jax.Array, main: int) -> jax.Array:
        """The rows' gradient."""
        return self._if(lambda: self._pull(d_out, main)[1])

    def add_weights(self, gradient: Any, d_out: jax.Array, main: int) -> Any:
        """Gradients of the experts' weights with these rows' part."""
        with jax.named_scope("overflow"):
            # a loop of no or one turn changes the gradients in place, where a branch would copy them
            return jax.lax.fori_loop(
                0,
                self.happened.astype(jnp.int32),
                lambda _, gradient: jax.tree.map(jnp.add, gradient, self._pull(d_out, main)[0]),
                gradient,
            )

    def _if(self, full: Callable[[], jax.Array]) -> jax.Array:
        shape, dtype = self.rest_R.shape, self.rest_R.dtype
        with jax.named_scope("overflow"):  # otherwise nobody reads these rows
            return jax.lax.cond(self.happened, lambda: full().reshape(shape), lambda: jax.lax.empty(shape, dtype))

    def _lanes(self, rows_R: jax.Array, main: int) -> jax.Array:
        held = len(self.filled_L)
        return _real(rows_R.reshape(held, len(rows_R) // held, math.prod(rows_R.shape[1:])), self.filled_L, main)

    def _pull(self, d_out: jax.Array, main: int) -> Any:
        return jax.vjp(_product, self.params, self._lanes(self.rest_R, main))[1](self._lanes(d_out, main))


def _product(params: Any, rows_LRD: jax.Array) -> jax.Array:
    return mlp(params, rows_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)))


def _real(rows_LRD: jax.Array, filled_L: jax.Array, low: int = 0) -> jax.Array:
    """The rows that exist; 0 for the others. The first has place `low` in its lane."""
    place_R = low + jnp.arange(rows_LRD.shape[1])
    return jnp.where((place_R < filled_L[:, None])[..., None], rows_LRD, 0)


@jax.custom_vjp
def _real_back(rows_LRD: jax.Array, filled_L: jax.Array) -> jax.Array:
    """The same rows; backward, cotangents of rows that do not exist are 0."""
    return rows_LRD


_real_back.defvjp(lambda rows, filled: (rows, filled), lambda filled, d_rows: (_real(d_rows, filled), None))
