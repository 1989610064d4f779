"""What every order provides and what it leaves for the way back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoE
from moe_jax.models.routing import Rows, capacity


class Order(NamedTuple):
    """The functions of an order, and which dimension of its rows [P, …] counts slots."""

    order: Callable[..., tuple[Any, Any]]
    experts: Callable[..., Any]
    inverse: Callable[..., jax.Array]
    cut: Callable[..., list[Any]]
    slot_axis: int


class Room(NamedTuple):
    """What a part of a device's batch finds of the slots (Lancet, capacity passing)."""

    slots: int  # of each expert for this device's whole batch
    used_E: Int[Array, " E"]  # pairs of earlier parts that chose each expert, dropped ones included
    parts: int = 1  # that the batch is cut into


class Ticket(NamedTuple):
    """The way back for a device's tokens."""

    rows: Rows
    weight_Tk: Float[Array, "T k"]
    num_dropped: Int[Array, ""]  # pairs that found no slot


def whole_room(moe: MoE, tokens: int) -> Room:
    """All slots of a batch of `tokens` tokens, none of them used."""
    return Room(slots=capacity(moe, tokens), used_E=jnp.zeros(moe.num_experts, jnp.int32))


def piece_bounds(size: int, pieces: int) -> list[int]:
    """Where `size` slots are cut into pieces as equal as possible: `pieces` + 1 numbers."""
    return [size * i // pieces for i in range(pieces + 1)]
