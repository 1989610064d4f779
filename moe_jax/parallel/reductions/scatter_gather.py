"""A reduce-scatter and an all-gather. Each is half of an all-reduce, and other work fits between them.

P ranks, m numbers for each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.config.facts import ReductionFacts
from moe_jax.parallel.mesh import Axis

FACTS = ReductionFacts(listed=1, one_scatter=True)


def reduce(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> Num[Array, " n"]:
    """Return the sum of `x_n` over all ranks of `axes`, on each of them."""
    padded = jnp.pad(x_n, (0, -len(x_n) % jax.lax.axis_size(axes)))
    sum_m = jax.lax.psum_scatter(padded, axes, tiled=True)
    return jax.lax.all_gather(sum_m, axes, tiled=True)[: len(x_n)]


def scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> Num[Array, " m"]:
    """Return row r of the sum of `x_Pm` over all ranks of `axes`, on rank r: the reduce-scatter alone."""
    return jax.lax.psum_scatter(x_Pm, axes)
