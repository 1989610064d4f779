"""The pipeline axis: a ring of stages, each with its own blocks. All functions run inside `shard_map`."""

from typing import Any

import jax
from jaxtyping import Array, Int, Shaped

from moe_jax.parallel.mesh import Axis


def stage() -> Int[Array, ""]:
    """This device's stage."""
    return jax.lax.axis_index(Axis.PIPELINE)


def to_next(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """What the stage before sends; the last one sends to the first."""
    return _shifted(x, 1)


def to_previous(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """What the stage behind sends; the first one sends to the last."""
    return _shifted(x, -1)


def sum_over_stages(tree: Any) -> Any:
    """Sum every leaf over the stages. Not to be differentiated."""
    with jax.named_scope("sum_over_stages"):
        return jax.lax.psum(tree, Axis.PIPELINE)


def _shifted(x: jax.Array, distance: int) -> jax.Array:
    stages = jax.lax.axis_size(Axis.PIPELINE)
    if stages == 1:
        return x
    with jax.named_scope("to_next_stage" if distance > 0 else "to_previous_stage"):
        return jax.lax.ppermute(x, Axis.PIPELINE, [(s, (s + distance) % stages) for s in range(stages)])
