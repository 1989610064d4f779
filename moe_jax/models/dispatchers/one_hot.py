"""Capacity dispatch by one-hot matrix products (GShard, Lepikhin et al. 2020, algorithm 1).

It needs T·E·C·D multiplications to move T·k rows, and is the simple reference for `capacity`. P expert ranks, L experts
on each, E = P·L, C rows sent to an expert, T tokens, k choices, D model width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.config.facts import DispatcherFacts
from moe_jax.models.dispatchers import capacity as slots
from moe_jax.models.dispatchers.protocol import CapacityState, ExpertRows, TokenDispatcher, full_capacity
from moe_jax.models.gates.choice import TopKRouting

FACTS = DispatcherFacts(name="einsum", listed=1)


class OneHotMetadata(NamedTuple):
    """Each token's weight in each slot."""

    combine_TEC: Float[Array, "T E C"]
    num_dropped: Int[Array, ""]


def permute(
    x_TD: Float[Array, "T D"], choice: TopKRouting, moe: MoEConfig, ep_size: int, capacity: CapacityState | None = None
) -> tuple[ExpertRows, OneHotMetadata]:
    """Return tokens in their slots [P, L, C, D]. `capacity` (None: all) is what earlier parts of the batch left."""
    tokens = x_TD.shape[0]
    capacity = capacity or full_capacity(moe, tokens)
    width = min(capacity.slots, tokens)
    chosen_TkE = jax.nn.one_hot(choice.expert_Tk, moe.num_experts, dtype=jnp.int32)
    pairs = chosen_TkE.reshape(-1, moe.num_experts)
    rank_TkE = (jnp.cumsum(pairs, axis=0) - 1).reshape(chosen_TkE.shape)
    keep_mask_TkE = chosen_TkE * (capacity.used_E + rank_TkE < capacity.slots)
    place_TkEC = jax.nn.one_hot(rank_TkE, width) * keep_mask_TkE[..., None]
    combine_TEC = jnp.einsum("tk,tkec->tec", choice.weight_Tk, place_TkEC)
    sent_ECD = jnp.einsum("tkec,td->ecd", place_TkEC.astype(x_TD.dtype), x_TD)
    num_dropped = pairs.sum() - place_TkEC.sum().astype(jnp.int32)
    rows = sent_ECD.reshape(ep_size, moe.num_experts // ep_size, width, x_TD.shape[1])
    return ExpertRows(rows), OneHotMetadata(combine_TEC, num_dropped)


def unpermute(returned_PLCD: Float[Array, "P L C D"], metadata: OneHotMetadata) -> Float[Array, "T D"]:
    """Return weighted sums of the slots."""
    ep_size, local_experts, *shape = returned_PLCD.shape
    y_ECD = returned_PLCD.reshape(ep_size * local_experts, *shape)
    return jnp.einsum("tec,ecd->td", metadata.combine_TEC, y_ECD.astype(jnp.float32)).astype(y_ECD.dtype)


DISPATCHER = TokenDispatcher(permute, slots.experts, unpermute, slots.split, slot_axis=2)
