"""Rows under way: an exchange that is put together when the first compute task needs it."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config import MoE
from moe_jax.models.hooks import hooks_of
from moe_jax.parallel.all_to_all import exchange_named
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.over_tensor import Route
from moe_jax.parallel.over_tensor.whole import Whole
from moe_jax.schedule.actions import Action
from moe_jax.step.scheduled.issue_order import Ties

UnderWay = tuple[jax.Array, ...]
Finish = Callable[[UnderWay], jax.Array]


class Arrival(NamedTuple):
    """A piece that is under way: its part of an exchange, and its leaves that are no rows."""

    exchange: "PendingExchange"
    place: int
    rest: Any


class PendingExchange:
    """An exchange of several pieces that is put together when the first of them is needed.

    `finish` makes rows of what is under way.
    """

    def __init__(self, under_way: UnderWay, finish: Finish, bounds: list[int], axis: int):
        self._under_way, self._finish, self._bounds, self._axis = under_way, finish, bounds, axis
        self._pieces: list[jax.Array] | None = None

    def piece(self, place: int, tie: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if self._pieces is None:
            *others, last = self._under_way
            self._pieces = jnp.split(self._finish((*others, tie(last))), self._bounds, axis=self._axis)
        return self._pieces[place]


def start(x: jax.Array, action: Action, route: Route, moe: MoE, ties: Ties) -> tuple[UnderWay, Finish]:
    """Start an exchange of rows. Returns what is under way, and a function that makes rows of it.

    Over tensor ranks a collective of XLA also ends here, as what it brings is gathered or summed; one in the background
    does so if it is cut into chunks.
    """
    exchange, ranks = exchange_named(route.algorithm), route.ranks
    around = hooks_of(moe).around(action.op, backward=action.direction == "B")

    def send(x: jax.Array) -> jax.Array:
        return around.after(exchange(around.before(x), ranks), x.dtype)

    def finish(under_way: UnderWay) -> jax.Array:
        return around.after(exchange.finish(under_way, ranks), x.dtype)

    under_way: UnderWay
    result: Finish = finish
    if jax.lax.axis_size(Axis.TENSOR) == 1:
        under_way = exchange.start(ties.in_order(around.before(x), exchange.only_starts), ranks)
    else:
        to_experts = (action.op == "dispatch") == (action.direction == "F")
        way, rows = route.way(to_experts=to_experts), ties.in_order(x, exchange.only_starts)
        if exchange.only_starts and isinstance(way, Whole):
            under_way, result = exchange.start(around.before(way.before(rows)), ranks), _then(finish, way.behind)
        else:
            under_way, result = (route.carry(rows, send, to_experts=to_experts),), operator.itemgetter(0)
    if x.size:
        ties.issued(under_way[-1], exchange.only_starts)
    return under_way, result


def _then(finish: Finish, behind: Callable[[jax.Array], jax.Array]) -> Finish:
    return lambda under_way: behind(finish(under_way))
