"""Capacity without padding: the rows that found a slot, sorted by expert, sent with their sizes (Lancet).

P expert ranks, L experts on each, E = P·L; S rows sent at most; T tokens of this part; D model width.
The experts see lanes as wide as their share of all slots (see `all_to_all.ragged`): more rows than that are rare, and
take a second, smaller product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import MoE
from moe_jax.models import routing
from moe_jax.models.gates.choice import Choice
from moe_jax.models.layers import mlp
from moe_jax.models.orders.protocol import Room, Ticket
from moe_jax.parallel.all_to_all.ragged import Lanes, Widths

_TILE = 8  # rows that hardware handles at once


class Sent(NamedTuple):
    """What a part of the batch sends."""

    rows_SD: Float[Array, "S D"]
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
    return Sent(routing.to_rows(x_TD, rows), kept_E), ticket


def lane_widths(room: Room, tokens: int, ranks: int) -> Widths:
    """Of the lanes for a part of `tokens` tokens: its share of an expert's slots, and the most there can be."""
    share = -(-room.slots * ranks // (room.parts * _TILE)) * _TILE
    most = ranks * min(room.slots, tokens)
    return Widths(min(share, most), max(most - share, 0))


def experts(params: Any, lanes: Lanes, moe: MoE, platform: str) -> Lanes:
    """Each expert on its lanes."""
    if not lanes.rest_LwD.size:
        return lanes._replace(main_LbD=_product(params, lanes.main_LbD))
    overflow = lanes.count_PE.sum(axis=0).max() > lanes.main_LbD.shape[1]  # of any rank: all take the same way
    main, rest = _lanes_through(params, lanes.main_LbD, lanes.rest_LwD, overflow)
    return Lanes(main, rest, lanes.count_PE)


def _product(params: Any, rows_LRD: jax.Array) -> jax.Array:
    return mlp(params, rows_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)))


@jax.custom_vjp
def _lanes_through(
    params: Any, main_LbD: Float[Array, "L b D"], rest_LwD: Float[Array, "L w D"], overflow: Bool[Array, ""]
) -> tuple[Float[Array, "L b D"], Float[Array, "L w D"]]:
    """Experts on both kinds of lanes; `rest` is only looked at if there is an overflow."""
    return _product(params, main_LbD), _if(overflow, lambda: _product(params, rest_LwD), lambda: rest_LwD)


def _if(overflow: jax.Array, full: Any, empty: Any) -> Any:
    with jax.named_scope("overflow"):
        return jax.lax.cond(overflow, full, empty)


def _forward(params: Any, main: jax.Array, rest: jax.Array, overflow: jax.Array) -> tuple[Any, Any]:
    out, pullback = jax.vjp(_product, params, main)
    out_rest = _if(overflow, lambda: _product(params, rest), lambda: rest)
    return (out, out_rest), (pullback, params, rest, overflow)


def _backward(saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array, None]:
    pullback, params, rest, overflow = saved
    d_main, d_rest = cotangents
    d_params, d_main = pullback(d_main)
    # two conditions, so that the gradients of rows do not wait for those of weights
    d_rows = _if(overflow, lambda: jax.vjp(lambda x: _product(params, x), rest)[1](d_rest)[0], lambda: d_rest)
    d_params = _if(
        overflow,
        lambda: jax.tree.map(jnp.add, d_params, jax.vjp(lambda p: _product(p, rest), params)[1](d_rest)[0]),
        lambda: d_params,
    )
    return d_params, d_main, d_rows, None


_lanes_through.defvjp(_forward, _backward)
