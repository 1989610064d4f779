"""Reduce-scatters of whole tiles, over one mesh axis after another, for TPUs.

XLA:TPU rewrites other reduce-scatters into all-reduces: those over several axes at once, and those whose rows are not
whole tiles. As many bytes travel as in one reduce-scatter over all axes.

P ranks, m numbers for each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import Axis

_LANES, _TILE = 128, 8 * 128


def scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> Num[Array, " m"]:
    """Return row r of the sum of `x_Pm` over all ranks of `axes`, on rank r."""
    length = x_Pm.shape[1]
    rest = jnp.pad(x_Pm, ((0, 0), (0, -length % _TILE)))
    for axis in axes:  # what remains are the rows for the ranks of the axes that follow
        rest = jax.lax.psum_scatter(rest.reshape(jax.lax.axis_size(axis), -1, _LANES), axis)
    return rest.reshape(-1)[:length]
