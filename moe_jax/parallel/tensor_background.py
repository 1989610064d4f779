"""Gathers and sums of rows over tensor ranks that run concurrently with the program, on CPU clusters.

Between the tasks that start and finish them they are `UnderWay` (`parallel.all_to_all`): the shape of the result, and a
handle of `parallel.background`. P expert ranks, t tensor ranks.
"""

import jax
from jaxtyping import Array, Float, Shaped

from moe_jax.parallel import background
from moe_jax.parallel.all_to_all import UnderWay
from moe_jax.parallel.mesh import Axis

_AXES = (Axis.TENSOR,)


def start_gather(x: Shaped[Array, "P ..."]) -> UnderWay:
    """Start to gather the rows of all tensor ranks, [tP, …]."""
    return _of_all(x), background.start(x, "gather_rows", _AXES)


def gather_after(under_way: UnderWay) -> UnderWay:
    """Gather the rows that another collective in the background brings, without waiting for them."""
    x, handle = under_way
    return _of_all(x), background.start_after(handle, "gather_rows", _AXES)


def start_sum(x: Float[Array, "tP ..."]) -> UnderWay:
    """Start to sum rows over tensor ranks. Each gets its block of P."""
    x_tP = x.reshape(jax.lax.axis_size(Axis.TENSOR), -1, *x.shape[1:])
    return jax.ShapeDtypeStruct(x_tP.shape[1:], x.dtype), background.start(x_tP, "scatter_rows", _AXES)


def finish(under_way: UnderWay) -> Shaped[Array, "..."]:
    """Wait for the rows."""
    shape, handle = under_way
    return background.finish(handle, shape)


def _of_all(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((jax.lax.axis_size(Axis.TENSOR) * x.shape[0], *x.shape[1:]), x.dtype)
