"""Rows under way: an exchange that is put together when the first compute task needs it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Arrival(NamedTuple):
    """A piece that is under way: its part of an exchange, and its leaves that are no rows."""

    exchange: "Moving"
    place: int
    rest: Any


class Moving:
    """An exchange of several pieces that is put together when the first of them is needed.

    `finish` makes rows of what is under way.
    """

    def __init__(
        self,
        under_way: tuple[jax.Array, ...],
        finish: Callable[[tuple[jax.Array, ...]], jax.Array],
        bounds: list[int],
        axis: int,
    ):
        self._under_way, self._finish, self._bounds, self._axis = under_way, finish, bounds, axis
        self._pieces: list[jax.Array] | None = None

    def piece(self, place: int, tie: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if self._pieces is None:
            *others, last = self._under_way
            self._pieces = jnp.split(self._finish((*others, tie(last))), self._bounds, axis=self._axis)
        return self._pieces[place]
