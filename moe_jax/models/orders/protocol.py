"""What every order provides and what it leaves for the way back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from moe_jax.models.routing import Rows


class Order(NamedTuple):
    """The three functions of an order."""

    order: Callable[..., tuple[Any, Any]]
    experts: Callable[..., jax.Array]
    inverse: Callable[..., jax.Array]


class Ticket(NamedTuple):
    """The way back for a device's tokens."""

    rows: Rows
    weight_Tk: Float[Array, "T k"]
    num_dropped: Int[Array, ""]  # pairs that found no slot
