"""One all-reduce."""

import jax
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import Axis


def reduce(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> Num[Array, " n"]:
    """The sum of `x_n` over all ranks of `axes`, on each of them."""
    return jax.lax.psum(x_n, axes)
