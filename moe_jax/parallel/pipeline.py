"""The pipeline axis: a ring of stages, each with its own blocks. All functions run inside `shard_map`."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array, Int, Shaped

from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ordering import after

Arriving = Callable[[jax.Array], jax.Array]  # gives what came, once its argument is computed


def stage() -> Int[Array, ""]:
    """This device's stage."""
    return jax.lax.axis_index(Axis.PIPELINE)


def to_next(x: Shaped[Array, "..."], in_background: bool) -> Arriving:
    """Send to the next stage, and the last one to the first; returns what takes in what the stage before sent."""
    return _sent(x, "to_next", in_background)


def to_previous(x: Shaped[Array, "..."], in_background: bool) -> Arriving:
    """Send to the stage before, and the first one to the last; returns what takes in what the stage behind sent."""
    return _sent(x, "to_previous", in_background)


def sum_over_stages(tree: Any) -> Any:
    """Sum every leaf over the stages. Not to be differentiated."""
    with jax.named_scope("sum_over_stages"):
        return jax.lax.psum(tree, Axis.PIPELINE)


def _sent(x: jax.Array, kind: Literal["to_next", "to_previous"], in_background: bool) -> Arriving:
    with jax.named_scope(f"{kind}_stage"):
        if in_background and jax.lax.axis_size(Axis.PIPELINE) > 1:
            ticket, arriving = background.start(x, kind, (Axis.PIPELINE,)), jax.ShapeDtypeStruct(x.shape, x.dtype)
            return lambda beside: background.finish(after(ticket, beside, "cpu"), arriving)
        moved = _moved(x, 1 if kind == "to_next" else -1)
    # received when `beside` is there, too: the compiler has to let it travel beside what computes that
    return lambda beside: jax.lax.optimization_barrier((moved, beside))[0]


def _moved(x: jax.Array, distance: int) -> jax.Array:
    stages = jax.lax.axis_size(Axis.PIPELINE)
    if stages == 1:
        return x
    return jax.lax.ppermute(x, Axis.PIPELINE, [(s, (s + distance) % stages) for s in range(stages)])
