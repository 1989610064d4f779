"""Capacity slots by one-hot matrix products (GShard, Lepikhin et al. 2020, algorithm 1).

Does T·E·C·D multiplications to move T·k rows: the obviously right twin of `slots`.
P expert ranks, L experts on each, E = P·L, C rows sent to an expert, T tokens, k choices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoE
from moe_jax.config.facts import OrderFacts
from moe_jax.models.gates.choice import Choice
from moe_jax.models.orders import slots
from moe_jax.models.orders.protocol import Order, Room, whole_room

FACTS = OrderFacts(name="einsum", listed=1)


class OneHotTicket(NamedTuple):
    """The way back for a device's tokens."""

    combine_TEC: Float[Array, "T E C"]  # a token's weight in each slot
    num_dropped: Int[Array, ""]


def order(
    x_TD: Float[Array, "T D"], choice: Choice, moe: MoE, ranks: int, room: Room | None = None
) -> tuple[Float[Array, "P L C D"], OneHotTicket]:
    """Tokens in their slots; `room` as for `slots`."""
    tokens = x_TD.shape[0]
    room = room or whole_room(moe, tokens)
    width = min(room.slots, tokens)
    chosen_TkE = jax.nn.one_hot(choice.expert_Tk, moe.num_experts, dtype=jnp.int32)
    pairs = chosen_TkE.reshape(-1, moe.num_experts)
    rank_TkE = (jnp.cumsum(pairs, axis=0) - 1).reshape(chosen_TkE.shape)
    kept_TkE = chosen_TkE * (room.used_E + rank_TkE < room.slots)
    place_TkEC = jax.nn.one_hot(rank_TkE, width) * kept_TkE[..., None]
    combine_TEC = jnp.einsum("tk,tkec->tec", choice.weight_Tk, place_TkEC)
    sent = jnp.einsum("tkec,td->ecd", place_TkEC.astype(x_TD.dtype), x_TD)
    dropped = pairs.sum() - place_TkEC.sum().astype(jnp.int32)
    return sent.reshape(ranks, moe.num_experts // ranks, width, x_TD.shape[1]), OneHotTicket(
        combine_TEC=combine_TEC, num_dropped=dropped
    )


def inverse(returned_PLCD: Float[Array, "P L C D"], ticket: OneHotTicket) -> Float[Array, "T D"]:
    """Weighted sums of the slots."""
    ranks, held, *shape = returned_PLCD.shape
    y_ECD = returned_PLCD.reshape(ranks * held, *shape)
    return jnp.einsum("tec,ecd->td", ticket.combine_TEC, y_ECD.astype(jnp.float32)).astype(y_ECD.dtype)


ORDER = Order(order, slots.experts, inverse, slots.cut, slot_axis=2)
