"""Dispatch for soft routing: slots hold mixes of all tokens, computed by two dense products.

P expert ranks, L experts on each, E = P·L, C slots of an expert for this device, T tokens, D model width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers.protocol import CapacityState, ExpertRows
from moe_jax.models.gates.choice import SoftRouting


class SoftMetadata(NamedTuple):
    """Each token's weights of all slots."""

    combine_TEC: Float[Array, "T E C"]
    num_dropped: Int[Array, ""]  # always 0: every token is in every slot


def permute(
    x_TD: Float[Array, "T D"], soft: SoftRouting, moe: MoEConfig, ep_size: int, capacity: CapacityState | None = None
) -> tuple[ExpertRows, SoftMetadata]:
    """Return the mixes [P, L, C, D]. They may use all slots, so `capacity` does not matter."""
    _, experts, slots = soft.dispatch_TEC.shape
    sent_ECD = jnp.einsum("tec,td->ecd", soft.dispatch_TEC.astype(x_TD.dtype), x_TD)
    rows = sent_ECD.reshape(ep_size, experts // ep_size, slots, x_TD.shape[1])
    return ExpertRows(rows), SoftMetadata(soft.combine_TEC, jnp.int32(0))


def unpermute(returned_PLCD: Float[Array, "P L C D"], metadata: SoftMetadata) -> Float[Array, "T D"]:
    """Return each token's mix of the experts' outputs for all slots."""
    y_ECD = returned_PLCD.reshape(-1, *returned_PLCD.shape[2:])
    weights_TEC = metadata.combine_TEC.astype(y_ECD.dtype)
    out_TD: jax.Array = jnp.einsum("tec,ecd->td", weights_TEC, y_ECD, preferred_element_type=jnp.float32)
    return out_TD.astype(y_ECD.dtype)
