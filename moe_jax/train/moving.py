"""Rows under way: an exchange that is put together when the first compute task needs it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.models.transformer import Computation
from moe_jax.parallel.all_to_all import EXCHANGES


class Arrival(NamedTuple):
    """A piece that is under way: its part of an exchange, and its leaves that are no rows."""

    exchange: "Moving"
    place: int
    rest: Any


class Moving:
    """An exchange of several pieces that is put together when the first of them is needed.

    `rows` makes rows of what travelled.
    """

    def __init__(
        self,
        under_way: tuple[jax.Array, ...],
        rows: Callable[[jax.Array], jax.Array],
        bounds: list[int],
        axis: int,
        how: Computation,
    ):
        self._under_way, self._rows, self._bounds, self._axis, self._how = under_way, rows, bounds, axis, how
        self._pieces: list[jax.Array] | None = None

    def piece(self, place: int, tie: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if self._pieces is None:
            *others, last = self._under_way
            travelled = EXCHANGES[self._how.exchange].finish((*others, tie(last)), self._how.ranks)
            self._pieces = jnp.split(self._rows(travelled), self._bounds, axis=self._axis)
        return self._pieces[place]
