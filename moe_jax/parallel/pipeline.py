"""The pipeline axis: a ring of stages, each with its own blocks. All functions run inside `shard_map`."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.trees import Tree

Receive = Callable[[jax.Array], jax.Array]  # returns what arrived, once its argument is computed


def stage() -> Int[Array, ""]:
    """Return the number of the stage of this device."""
    return jax.lax.axis_index(Axis.PIPELINE)


def to_next(x: Shaped[Array, "..."]) -> Receive:
    """Send `x` to the next stage; the last stage sends to the first.

    Returns the function that receives what the previous stage sent.
    """
    return _send(x, 1, "to_next")


def to_previous(x: Shaped[Array, "..."]) -> Receive:
    """Send `x` to the previous stage; the first stage sends to the last.

    Returns the function that receives what the next stage sent.
    """
    return _send(x, -1, "to_previous")


def start_transfer(x: Shaped[Array, "..."], kind: Literal["to_next", "to_previous"], part_2: Bool[Array, "2"]) -> Array:
    """Start a transfer in the background and return the handle of what arrives.

    On CPUs it runs concurrently with the program, and may be received many ticks later. `part_2` holds whether this
    stage sends, and whether it receives.
    """
    with jax.named_scope(f"{kind}_stage"):
        if jax.lax.axis_size(Axis.PIPELINE) == 1:
            return no_handle()
        return background.start(x, kind, (Axis.PIPELINE,), part_2)


def no_handle() -> Int[Array, ""]:
    """Return the handle of no transfer. Receiving it returns zeros."""
    return jnp.int32(background.NOTHING)


def receive_transfer(handle: Int[Array, ""], x: jax.ShapeDtypeStruct) -> Receive:
    """Return the function that receives a transfer in the background, of the shape of `x`."""
    with jax.named_scope("arrive_at_stage"):
        return lambda computed: background.finish(depend_on(handle, computed, "cpu"), x)


def sum_over_stages(tree: Tree) -> Tree:
    """Sum every leaf over the stages. Not differentiable."""
    with jax.named_scope("sum_over_stages"):
        return jax.lax.psum(tree, Axis.PIPELINE)


def _send(x: jax.Array, distance: int, kind: str) -> Receive:
    with jax.named_scope(f"{kind}_stage"):
        moved = _shift(x, distance)
    # received only when `computed` exists as well, so that the compiler overlaps the transfer with its computation
    return lambda computed: jax.lax.optimization_barrier((moved, computed))[0]


def _shift(x: jax.Array, distance: int) -> jax.Array:
    stages = jax.lax.axis_size(Axis.PIPELINE)
    if stages == 1:
        return x
    return permuted(x, Axis.PIPELINE, [(s, (s + distance) % stages) for s in range(stages)])
