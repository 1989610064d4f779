"""Capacity slots: each device gives every expert C slots, filled in token order; later pairs are dropped.

P expert ranks, L experts on each, C slots per expert and source device, T tokens, D model width, F hidden width.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoE
from moe_jax.models import routing
from moe_jax.models.gates.choice import Choice
from moe_jax.models.layers import mlp
from moe_jax.models.orders.protocol import Ticket


def order(x_TD: Float[Array, "T D"], choice: Choice, moe: MoE, ranks: int) -> tuple[Float[Array, "P L C D"], Ticket]:
    """Tokens in their slots."""
    slots = routing.capacity(moe, x_TD.shape[0])
    count_E = routing.expert_counts(choice.expert_Tk, moe.num_experts)
    slot_Tk = routing.rank_in_expert(choice.expert_Tk, count_E)
    kept_Tk = slot_Tk < slots
    rows = routing.assign_rows(choice.expert_Tk * slots + slot_Tk, kept_Tk, moe.num_experts * slots)
    sent = routing.to_rows(x_TD, rows).reshape(ranks, moe.num_experts // ranks, slots, -1)
    return sent, Ticket(rows=rows, weight_Tk=choice.weight_Tk, num_dropped=jnp.sum(~kept_Tk))


def experts(params: Any, received_PLCD: Float[Array, "P L C D"], moe: MoE, platform: str) -> Float[Array, "P L C D"]:
    """Each expert on the slots of all sources, as one batched matrix product."""
    ranks, held, slots, width = received_PLCD.shape
    x_LRD = jnp.swapaxes(received_PLCD, 0, 1).reshape(held, ranks * slots, width)
    y_LRD = mlp(params, x_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)))
    return jnp.swapaxes(y_LRD.reshape(held, ranks, slots, width), 0, 1)


def inverse(returned_PLCD: Float[Array, "P L C D"], ticket: Ticket) -> Float[Array, "T D"]:
    """Weighted sums of the slots; a token whose pairs were all dropped gets 0."""
    return routing.from_rows(returned_PLCD.reshape(-1, returned_PLCD.shape[-1]), ticket.weight_Tk, ticket.rows)
