"""A reduction on a CPU cluster that runs concurrently with the program: see `parallel.background`.

Tensor ranks are on one node. A sum over these and other ranks is scattered over the tensor ranks first and gathered
over them last, so that each sends only its part of the numbers to other nodes.

P ranks, of which t are tensor ranks; n or m numbers for each.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.config.facts import ReductionFacts
from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis

FACTS = ReductionFacts(listed=3, in_background=True, only_starts=True)

_IN_NODE = (Axis.TENSOR,)


def start(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Start the sum of `x_n` over all ranks of `axes`.

    Returns its length, the shape and dtype of the result with padding, and a handle.
    """
    between = _between_nodes(axes)
    if not between:
        return len(x_n), jax.ShapeDtypeStruct(x_n.shape, x_n.dtype), background.start(x_n, "sum", axes)
    ranks = jax.lax.axis_size(Axis.TENSOR)
    x_tm = jnp.pad(x_n, (0, -len(x_n) % ranks)).reshape(ranks, -1)
    handle = background.start(x_tm, "scatter_in_node", _IN_NODE)
    handle = background.start_after(handle, "sum", between)
    handle = background.start_after(handle, "gather_in_node", _IN_NODE)
    return len(x_n), jax.ShapeDtypeStruct((x_tm.size,), x_n.dtype), handle


def start_scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Start the sum of `x_Pm` over all ranks of `axes`, of which rank r gets row r. Returns the same as `start`."""
    between, length = _between_nodes(axes), x_Pm.shape[1]
    own_m = jax.ShapeDtypeStruct((length,), x_Pm.dtype)
    if not between:
        return length, own_m, background.start(x_Pm, "scatter", axes)
    place = axes.index(Axis.TENSOR)
    before, after = (math.prod(map(jax.lax.axis_size, some)) for some in (axes[:place], axes[place + 1 :]))
    x_btam = x_Pm.reshape(before, -1, after, length)
    handle = background.start(x_btam.swapaxes(0, 1).reshape(-1, before * after, length), "scatter_in_node", _IN_NODE)
    return length, own_m, background.start_after(handle, "scatter", between)


def finish(under_way: tuple[Any, ...]) -> Num[Array, " n"]:
    """Wait for the sum, or for this rank's row of it."""
    length, shape, handle = under_way
    return background.finish(handle, shape)[:length]


def _between_nodes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the other axes of a sum that is over tensor ranks, too; none if one collective over `axes` is enough."""
    sizes = {axis: jax.lax.axis_size(axis) for axis in axes}
    others = tuple(axis for axis, size in sizes.items() if axis != Axis.TENSOR and size > 1)
    return others if sizes.get(Axis.TENSOR, 1) > 1 else ()
