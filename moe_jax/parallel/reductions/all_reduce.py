"""One all-reduce.

P ranks, m numbers for each.
"""

import jax
from jaxtyping import Array, Num

from moe_jax.config.facts import ReductionFacts
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.reductions import scatter_gather

FACTS = ReductionFacts(listed=0, one_scatter=True, any_shape=True)


def reduce(x: Num[Array, "..."], axes: tuple[Axis, ...]) -> Num[Array, "..."]:
    """Return the sum of `x` over all ranks of `axes`, on each of them."""
    return jax.lax.psum(x, axes)


def scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> Num[Array, " m"]:
    """Return row r of the sum of `x_Pm` over all ranks of `axes`, on rank r."""
    return scatter_gather.scatter(x_Pm, axes)
