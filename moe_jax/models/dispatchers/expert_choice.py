"""Dispatch for expert choice: experts fill their slots with the tokens that they pick.

No slot is empty, and a token may be in any number of slots. P expert ranks, L experts on each, E = P·L, C slots of an
expert for this device, T tokens, D model width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers.protocol import CapacityState, ExpertRows
from moe_jax.models.gates.choice import ExpertChoiceRouting


class ExpertChoiceMetadata(NamedTuple):
    """The token in each slot, and its weight there."""

    token_EC: Int[Array, "E C"]
    weight_EC: Float[Array, "E C"]
    picks_T: Int[Array, " T"]  # how many experts picked each token
    num_dropped: Int[Array, ""]  # always 0: tokens do not ask for slots


def permute(
    x_TD: Float[Array, "T D"],
    picked: ExpertChoiceRouting,
    moe: MoEConfig,
    ep_size: int,
    capacity: CapacityState | None = None,
) -> tuple[ExpertRows, ExpertChoiceMetadata]:
    """Return the picked tokens [P, L, C, D]. They may use all slots, so `capacity` does not matter."""
    experts, slots = picked.token_EC.shape
    picks_T = jnp.zeros(len(x_TD), jnp.int32).at[picked.token_EC.ravel()].add(1)
    rows = x_TD[picked.token_EC.ravel()].reshape(ep_size, experts // ep_size, slots, x_TD.shape[1])
    return ExpertRows(rows), ExpertChoiceMetadata(picked.token_EC, picked.weight_EC, picks_T, jnp.int32(0))


def unpermute(returned_PLCD: Float[Array, "P L C D"], metadata: ExpertChoiceMetadata) -> Float[Array, "T D"]:
    """Return weighted sums of the outputs of the experts that picked each token; 0 for a token that none picked."""
    y_RD = returned_PLCD.reshape(-1, returned_PLCD.shape[-1])
    weighted_RD = metadata.weight_EC.reshape(-1, 1) * y_RD  # float32
    total_TD = jnp.zeros((len(metadata.picks_T), y_RD.shape[1]), jnp.float32)
    return total_TD.at[metadata.token_EC.ravel()].add(weighted_RD).astype(y_RD.dtype)
