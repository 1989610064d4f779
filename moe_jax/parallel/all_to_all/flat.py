"""One all-to-all over the whole axis."""

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.mesh import Axis


def exchange(x: Shaped[Array, "P ..."], axis: Axis) -> Shaped[Array, "P ..."]:
    """Send block p to rank p of `axis`; block p of the result came from rank p. Its own inverse."""
    if jax.lax.axis_size(axis) == 1:
        return x
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
