"""Slots that experts fill with the tokens they picked: none is empty, and a token may be in any number of them.

P expert ranks, L experts on each, E = P·L, C slots of an expert for this device, T tokens, D model width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoE
from moe_jax.models.gates.choice import Picked
from moe_jax.models.orders.protocol import Room


class PickedTicket(NamedTuple):
    """The way back for a device's tokens."""

    token_EC: Int[Array, "E C"]
    weight_EC: Float[Array, "E C"]
    picks_T: Int[Array, " T"]  # experts that picked a token
    num_dropped: Int[Array, ""]  # none: nobody asked for a slot


def order(
    x_TD: Float[Array, "T D"], picked: Picked, moe: MoE, ranks: int, room: Room | None = None
) -> tuple[Float[Array, "P L C D"], PickedTicket]:
    """The picked tokens. All slots are for these tokens, so `room` does not matter."""
    experts, slots = picked.token_EC.shape
    picks_T = jnp.zeros(len(x_TD), jnp.int32).at[picked.token_EC.ravel()].add(1)
    sent = x_TD[picked.token_EC.ravel()].reshape(ranks, experts // ranks, slots, x_TD.shape[1])
    return sent, PickedTicket(picked.token_EC, picked.weight_EC, picks_T, jnp.int32(0))


def inverse(returned_PLCD: Float[Array, "P L C D"], ticket: PickedTicket) -> Float[Array, "T D"]:
    """Weighted sums of what the experts that picked a token made of it; 0 without any."""
    y_RD = returned_PLCD.reshape(-1, returned_PLCD.shape[-1])
    weighted_RD = ticket.weight_EC.reshape(-1, 1) * y_RD  # float32
    total_TD = jnp.zeros((len(ticket.picks_T), y_RD.shape[1]), jnp.float32).at[ticket.token_EC.ravel()].add(weighted_RD)
    return total_TD.astype(y_RD.dtype)
