"""Arrays [slots, …] that outlive a tick."""

import jax


def get(x: jax.Array, place: jax.Array | int) -> jax.Array:
    """An element along the leading dimension."""
    return x[place] if isinstance(place, int) else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def put(x: jax.Array, value: jax.Array, place: jax.Array | int) -> jax.Array:
    """The same array with another element there."""
    return jax.lax.dynamic_update_index_in_dim(x, value, place, axis=0)
