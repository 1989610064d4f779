"""Capacity without padding: the rows that found a slot, sorted by expert, sent with their sizes (Lancet).

P expert ranks, L experts on each, E = P·L; S rows sent at most; T tokens of this part; D model width.
The experts see lanes as wide as their share of all slots (see `all_to_all.ragged`): more rows than that are rare, and
take a second, smaller product.
"""

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


def experts(params: Any, lanes: Lanes, moe: MoE, platform: str) -> Lanes:
    """Each expert on its lanes."""
    overflow = lanes.count_PE.sum(axis=0).max() > lanes.main_LbD.shape[1]  # of any rank: all take the same way
    out = _through(params, lanes.main_LbD, lanes.rest_R, filled(lanes.count_PE, Axis.EXPERT), overflow)
    return Lanes(*out, lanes.count_PE)


def _product(params: Any, rows_LRD: jax.Array) -> jax.Array:
    return mlp(params, rows_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)))


def _lanes(rows_R: jax.Array, like_LbD: jax.Array) -> jax.Array:
    """Rows one lane behind the other as [L, w, D]."""
    return rows_R.reshape(len(like_LbD), -1, like_LbD.shape[2])


def _real(rows_LRD: jax.Array, filled_L: jax.Array, low: int = 0) -> jax.Array:
    """The rows that exist; 0 for the others. The first has place `low` in its lane."""
    place_R = low + jnp.arange(rows_LRD.shape[1])
    return jnp.where((place_R < filled_L[:, None])[..., None], rows_LRD, 0)


@jax.custom_vjp
def _through(
    params: Any,
    main_LbD: Float[Array, "L b D"],
    rest_R: Float[Array, "R ..."],
    filled_L: Int[Array, " L"],
    overflow: Bool[Array, ""],
) -> tuple[Float[Array, "L b D"], Float[Array, "R ..."]]:
    """Experts on both kinds of lanes; `rest` is only looked at if there is an overflow."""
    return _forward(params, main_LbD, rest_R, filled_L, overflow)[0]


def _forward(
    params: Any, main: jax.Array, rest: jax.Array, filled_L: jax.Array, overflow: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    out, pullback = jax.vjp(_product, params, _real(main, filled_L))

    def second() -> jax.Array:
        return _product(params, _real(_lanes(rest, main), filled_L, main.shape[1])).reshape(rest.shape)

    return (out, _if(overflow, second, _anything(rest))), (pullback, params, rest, filled_L, overflow)


def _backward(saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array, None, None]:
    pullback, params, rest, filled_L, overflow = saved
    low = cotangents[0].shape[1]
    d_params, d_main = pullback(_real(cotangents[0], filled_L))

    def rest_back() -> tuple[Any, jax.Array]:
        second, second_back = jax.vjp(_product, params, _real(_lanes(rest, d_main), filled_L, low))
        d_weights, d_rows = second_back(_real(_lanes(cotangents[1], second), filled_L, low))
        return d_weights, d_rows.reshape(rest.shape)

    # two conditions, so that the gradients of rows do not wait for those of weights
    d_rest = _if(overflow, lambda: rest_back()[1], _anything(rest))
    d_params = _if(overflow, lambda: jax.tree.map(jnp.add, d_params, rest_back()[0]), lambda: d_params)
    return d_params, d_main, d_rest, None, None


def _if(overflow: jax.Array, full: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    with jax.named_scope("overflow"):
        return jax.lax.cond(overflow, full, otherwise)


def _anything(rows: jax.Array) -> Callable[[], jax.Array]:
    """Rows that nobody reads."""
    return lambda: jax.lax.empty(rows.shape, rows.dtype)


_through.defvjp(_forward, _backward)
