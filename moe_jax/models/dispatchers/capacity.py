"""The dispatcher `sort`, with a capacity: padded dispatch, in which each device gives every expert C slots.

Pairs that come later, in the order of tokens or of their priority, are dropped. P expert ranks, L experts on each, C
rows sent to an expert by a source device, T tokens, D model width, F hidden width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import DispatcherFacts
from moe_jax.models import routing
from moe_jax.models.dispatchers.protocol import (
    CapacityState,
    ExpertRows,
    TokenDispatcher,
    TopKMetadata,
    full_capacity,
    piece_bounds,
)
from moe_jax.models.expert_matmuls import expert_product
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.layers import EACH, mlp
from moe_jax.parallel.trees import Params

FACTS = DispatcherFacts(name="sort", listed=0, sorts_rows=True)


def permute(
    x_TD: Float[Array, "T D"], choice: TopKRouting, moe: MoEConfig, ep_size: int, capacity: CapacityState | None = None
) -> tuple[ExpertRows, TopKMetadata]:
    """Return tokens in their slots [P, L, C, D]. `capacity` is what earlier parts of the batch left; steps
    always give it, and without it, in tests, experts have all of theirs.

    A part has at most one row per token for an expert, so it sends no more slots than it has tokens.
    """
    capacity = capacity or full_capacity(moe, x_TD.shape[0])
    width = min(capacity.slots, x_TD.shape[0])
    count_E = choice.tokens_per_expert()
    rank_Tk = routing.queue_positions(choice, count_E)
    # expert E means no expert: its position in the queue is beyond every capacity
    keep_mask_Tk = capacity.used_E[choice.expert_Tk] + rank_Tk < capacity.slots
    dest_index_Tk = choice.expert_Tk * width + rank_Tk
    permutation = routing.make_permutation(dest_index_Tk, keep_mask_Tk, moe.num_experts * width)
    rows = routing.to_rows(x_TD, permutation).reshape(ep_size, moe.num_experts // ep_size, width, x_TD.shape[1])
    num_dropped = count_E.sum() - keep_mask_Tk.sum()
    return ExpertRows(rows), TopKMetadata(permutation, choice.weight_Tk, num_dropped)


def split(sent: ExpertRows, pieces: int) -> list[ExpertRows]:
    """Split the slots of every expert into equal pieces."""
    bounds = piece_bounds(sent.rows.shape[2], pieces)[1:-1]
    return [ExpertRows(rows) for rows in jnp.split(sent.rows, bounds, axis=2)]


def experts(params: Params, received: ExpertRows, moe: MoEConfig, product: GroupedProduct) -> Float[Array, "P L C D"]:
    """Apply each expert to the slots of all sources, as one batched matrix product."""
    ep_size, local_experts, slots, width = received.rows.shape
    x_LRD = jnp.swapaxes(received.rows, 0, 1).reshape(local_experts, ep_size * slots, width)
    y_LRD = mlp(params, x_LRD, expert_product(EACH, moe))
    return jnp.swapaxes(y_LRD.reshape(local_experts, ep_size, slots, width), 0, 1)


def unpermute(returned_PLCD: Float[Array, "P L C D"], metadata: TopKMetadata) -> Float[Array, "T D"]:
    """Return weighted sums of the slots. A token whose pairs were all dropped gets 0."""
    rows = returned_PLCD.reshape(-1, returned_PLCD.shape[-1])
    return routing.from_rows(rows, metadata.weight_Tk, metadata.permutation)


DISPATCHER = TokenDispatcher(permute, experts, unpermute, split, slot_axis=2)
