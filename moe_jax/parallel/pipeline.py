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

Arriving = Callable[[jax.Array], jax.Array]  # gives what came, once its argument is computed


def stage() -> Int[Array, ""]:
    """This device's stage."""
    return jax.lax.axis_index(Axis.PIPELINE)


def to_next(x: Shaped[Array, "..."]) -> Arriving:
    """Send to the next stage, and the last one to the first; returns what takes in what the stage before sent."""
    return _sent(x, 1, "to_next")


def to_previous(x: Shaped[Array, "..."]) -> Arriving:
    """Send to the stage before, and the first one to the last; returns what takes in what the stage behind sent."""
    return _sent(x, -1, "to_previous")


def post(x: Shaped[Array, "..."], kind: Literal["to_next", "to_previous"], part_2: Bool[Array, "2"]) -> Array:
    """The same on CPUs, beside the program: gives the ticket of what comes, which may be taken in many ticks later.

    `part_2` says whether this stage sends, and whether it receives.
    """
    with jax.named_scope(f"{kind}_stage"):
        if jax.lax.axis_size(Axis.PIPELINE) == 1:
            return nothing_posted()
        return background.start(x, kind, (Axis.PIPELINE,), part_2)


def nothing_posted() -> Int[Array, ""]:
    """The ticket of nothing: zeros come."""
    return jnp.int32(background.NOTHING)


def arriving(ticket: Int[Array, ""], x: jax.ShapeDtypeStruct) -> Arriving:
    """Takes in what was posted, of this shape."""
    with jax.named_scope("arrive_at_stage"):
        return lambda beside: background.finish(depend_on(ticket, beside, "cpu"), x)


def sum_over_stages(tree: Tree) -> Tree:
    """Sum every leaf over the stages. Not to be differentiated."""
    with jax.named_scope("sum_over_stages"):
        return jax.lax.psum(tree, Axis.PIPELINE)


def _sent(x: jax.Array, distance: int, kind: str) -> Arriving:
    with jax.named_scope(f"{kind}_stage"):
        moved = _moved(x, distance)
    # received when `beside` is there, too: the compiler has to let it travel beside what computes that
    return lambda beside: jax.lax.optimization_barrier((moved, beside))[0]


def _moved(x: jax.Array, distance: int) -> jax.Array:
    stages = jax.lax.axis_size(Axis.PIPELINE)
    if stages == 1:
        return x
    return permuted(x, Axis.PIPELINE, [(s, (s + distance) % stages) for s in range(stages)])
