"""What every order provides and what it leaves for the way back."""

import math
from collections.abc import Callable
from fractions import Fraction
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


class Buffer(NamedTuple):
    """What a rank has room for from each source, where experts have no capacity."""

    rows: int  # of each sequence
    tokens: int  # of a sequence


class Room(NamedTuple):
    """What a part of a device's batch finds of the slots (Lancet, capacity passing)."""

    slots: int  # of each expert for this device's whole batch
    used_E: Int[Array, " E"]  # pairs of earlier parts that chose each expert, dropped ones included
    parts: int = 1  # that the batch is cut into
    buffer: Buffer | None = None  # instead of slots; None: for the worst case


class Ticket(NamedTuple):
    """The way back for a device's tokens."""

    rows: Rows
    weight_Tk: Float[Array, "T k"]
    num_dropped: Int[Array, ""]  # pairs that found no slot, or no room in the buffer


def whole_room(moe: MoE, tokens: int) -> Room:
    """All slots of a batch of `tokens` tokens, none of them used."""
    return Room(slots=capacity(moe, tokens), used_E=jnp.zeros(moe.num_experts, jnp.int32))


def buffer_of(moe: MoE, factor: float | None, tokens: int, ranks: int) -> Buffer | None:
    """Room on each of `ranks` for `factor` times an even share of a sequence of `tokens` tokens, ceil(f·N·k/P) rows.

    None: for the worst case, which is not exceeded.
    """
    if factor is None or not moe.sends_sized_rows:
        return None
    share = math.ceil(Fraction(str(factor)) * tokens * moe.top_k / ranks)
    worst = tokens * min(moe.top_k, moe.num_experts // ranks)
    return Buffer(share, tokens) if share < worst else None


def piece_bounds(size: int, pieces: int) -> list[int]:
    """Where `size` slots are cut into pieces as equal as possible: `pieces` + 1 numbers."""
    return [size * i // pieces for i in range(pieces + 1)]
