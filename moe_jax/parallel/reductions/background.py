"""Beside the program, on a CPU cluster: see `parallel.background`.

P ranks, m numbers of each.
"""

from typing import Any

import jax
from jaxtyping import Array, Num

from moe_jax.config.facts import ReductionFacts
from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis

FACTS = ReductionFacts(listed=3, in_background=True, only_starts=True)


def start(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Sum `x_n` over all ranks of `axes`. Returns the result's shape and dtype, and a ticket."""
    return jax.ShapeDtypeStruct(x_n.shape, x_n.dtype), background.start(x_n, "sum", axes)


def start_scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Sum `x_Pm` over all ranks of `axes`, for row r to be on rank r; as `start`."""
    return jax.ShapeDtypeStruct(x_Pm.shape[1:], x_Pm.dtype), background.start(x_Pm, "scatter", axes)


def finish(under_way: tuple[Any, ...]) -> Num[Array, " n"]:
    """The sum, or this rank's row of it."""
    shape, ticket = under_way
    return background.finish(ticket, shape)
