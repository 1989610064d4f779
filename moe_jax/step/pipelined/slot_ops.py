"""Arrays [slots, …] that outlive a tick."""

from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def get(x: jax.Array, place: jax.Array | int) -> jax.Array:
    """An element along the leading dimension."""
    return x[place] if isinstance(place, int) else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def put(x: jax.Array, value: jax.Array, place: jax.Array | int) -> jax.Array:
    """The same array with another element there."""
    return jax.lax.dynamic_update_index_in_dim(x, value, place, axis=0)


def taken_out(values: Sequence[jax.Array], platform: str) -> list[jax.Array]:
    """The same values, whose users have no say in how the arrays that they lay in are laid out.

    Else XLA:GPU lays out all slots as who reads one wants it, and copies them in every tick: 1.3 × the step on 8 H100.
    XLA:TPU does not, and takes 1.8 × as long where values have to be laid out so.
    """
    if platform == "gpu":
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in values]
    return list(values)
