"""A reduction on a CPU cluster that runs concurrently with the program: see `parallel.background`.

P ranks, m numbers for each.
"""

from typing import Any

import jax
from jaxtyping import Array, Num

from moe_jax.config.facts import ReductionFacts
from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis

FACTS = ReductionFacts(listed=3, in_background=True, only_starts=True)


def start(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Start the sum of `x_n` over all ranks of `axes`. Returns the shape and dtype of the result, and a handle."""
    return jax.ShapeDtypeStruct(x_n.shape, x_n.dtype), background.start(x_n, "sum", axes)


def start_scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Start the sum of `x_Pm` over all ranks of `axes`, of which rank r gets row r. Returns the same as `start`."""
    return jax.ShapeDtypeStruct(x_Pm.shape[1:], x_Pm.dtype), background.start(x_Pm, "scatter", axes)


def finish(under_way: tuple[Any, ...]) -> Num[Array, " n"]:
    """Wait for the sum, or for this rank's row of it."""
    shape, handle = under_way
    return background.finish(handle, shape)
