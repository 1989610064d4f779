"""Capacity slots: each device gives every expert C slots; pairs that come later in the order of tokens, or of their
priority, are dropped.

P expert ranks, L experts on each, C rows sent to an expert by a source device, T tokens, D model width, F hidden width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoE
from moe_jax.config.facts import OrderFacts
from moe_jax.models import routing
from moe_jax.models.expert_matmuls import as_experts_multiply
from moe_jax.models.gates.choice import Choice
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.layers import EACH, mlp
from moe_jax.models.orders.protocol import Order, Room, Ticket, piece_bounds, whole_room

FACTS = OrderFacts(name="sort", listed=0, sorts_rows=True)


def order(
    x_TD: Float[Array, "T D"], choice: Choice, moe: MoE, ranks: int, room: Room | None = None
) -> tuple[Float[Array, "P L C D"], Ticket]:
    """Tokens in their slots; `room` (None: all) is what earlier parts of the batch left.

    A part brings an expert at most one row per token, so it sends no more slots than it has tokens.
    """
    room = room or whole_room(moe, x_TD.shape[0])
    width = min(room.slots, x_TD.shape[0])
    count_E = choice.count_E()
    rank_Tk = routing.ranks(choice, count_E)
    kept_Tk = room.used_E[choice.expert_Tk] + rank_Tk < room.slots
    rows = routing.assign_rows(choice.expert_Tk * width + rank_Tk, kept_Tk, moe.num_experts * width)
    sent = routing.to_rows(x_TD, rows).reshape(ranks, moe.num_experts // ranks, width, x_TD.shape[1])
    return sent, Ticket(rows=rows, weight_Tk=choice.weight_Tk, num_dropped=count_E.sum() - kept_Tk.sum())


def cut(sent_PLCD: Float[Array, "P L C D"], pieces: int) -> list[jax.Array]:
    """The slots of every expert in equal pieces."""
    return jnp.split(sent_PLCD, piece_bounds(sent_PLCD.shape[2], pieces)[1:-1], axis=2)


def experts(
    params: Any, received_PLCD: Float[Array, "P L C D"], moe: MoE, product: GroupedProduct
) -> Float[Array, "P L C D"]:
    """Each expert on the slots of all sources, as one batched matrix product."""
    ranks, held, slots, width = received_PLCD.shape
    x_LRD = jnp.swapaxes(received_PLCD, 0, 1).reshape(held, ranks * slots, width)
    y_LRD = mlp(params, x_LRD, as_experts_multiply(EACH, moe))
    return jnp.swapaxes(y_LRD.reshape(held, ranks, slots, width), 0, 1)


def inverse(returned_PLCD: Float[Array, "P L C D"], ticket: Ticket) -> Float[Array, "T D"]:
    """Weighted sums of the slots; a token whose pairs were all dropped gets 0."""
    return routing.from_rows(returned_PLCD.reshape(-1, returned_PLCD.shape[-1]), ticket.weight_Tk, ticket.rows)


ORDER = Order(order, experts, inverse, cut, slot_axis=2)
