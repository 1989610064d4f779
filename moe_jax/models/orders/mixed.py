"""Slots that hold mixes of all tokens, by two dense products.

P expert ranks, L experts on each, E = P·L, C slots of an expert for this device, T tokens, D model width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoE
from moe_jax.models.gates.choice import Mixed
from moe_jax.models.orders.protocol import Room


class MixedTicket(NamedTuple):
    """The way back for a device's tokens."""

    combine_TEC: Float[Array, "T E C"]
    num_dropped: Int[Array, ""]  # none: every token is in every slot


def order(
    x_TD: Float[Array, "T D"], mixed: Mixed, moe: MoE, ranks: int, room: Room | None = None
) -> tuple[Float[Array, "P L C D"], MixedTicket]:
    """The mixes. All slots are for these tokens, so `room` does not matter."""
    _, experts, slots = mixed.dispatch_TEC.shape
    sent_ECD = jnp.einsum("tec,td->ecd", mixed.dispatch_TEC.astype(x_TD.dtype), x_TD)
    sent = sent_ECD.reshape(ranks, experts // ranks, slots, x_TD.shape[1])
    return sent, MixedTicket(mixed.combine_TEC, jnp.int32(0))


def inverse(returned_PLCD: Float[Array, "P L C D"], ticket: MixedTicket) -> Float[Array, "T D"]:
    """Each token's mix of what the experts made of all slots."""
    y_ECD = returned_PLCD.reshape(-1, *returned_PLCD.shape[2:])
    weights_TEC = ticket.combine_TEC.astype(y_ECD.dtype)
    out_TD: jax.Array = jnp.einsum("tec,ecd->td", weights_TEC, y_ECD, preferred_element_type=jnp.float32)
    return out_TD.astype(y_ECD.dtype)
