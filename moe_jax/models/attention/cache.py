"""The cache of decoding: one slot for each token of a sequence, at its position.

B sequences, N further tokens of each, S slots.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.models.attention.core import causal_mask


def update_slots(
    cache_BS: Float[Array, "B S ..."], new_BN: Float[Array, "B N ..."], position_B: Int[Array, " B"]
) -> Float[Array, "B S ..."]:
    """Return the cache with the features of further tokens, which begin at `position_B` in each sequence."""
    put = jax.vmap(lambda slots, new, position: jax.lax.dynamic_update_slice_in_dim(slots, new, position, axis=0))
    return put(cache_BS, new_BN, position_B)


def visible_slots(position_BN: Int[Array, "B N"], slots: int, window: int | None) -> Bool[Array, "B N S"]:
    """Return whether the token at each position attends to the token in each slot."""
    return jax.vmap(lambda position_N: causal_mask(position_N, jnp.arange(slots), window))(position_BN)
