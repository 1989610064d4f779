"""Parameters and gradients of a model chunk's blocks, in the stacked arrays of a stage."""

import functools
from typing import Any

import jax

from moe_jax.train.pipeline.buffers import get, put
from moe_jax.train.pipeline.plan import Plan

Tree = Any


def weights_of(params: Tree, plan: Plan, structure: int, chunk: jax.Array) -> dict[int, Tree]:
    """Of each block of a model chunk."""
    weights = {}
    for block, held in enumerate(plan.structures[structure]):
        take = functools.partial(get, place=_row(plan, structure, block, chunk))
        weights[block] = jax.tree.map(take, params["segments"][held.segment][held.place])
    return weights


def added(grads: Tree, plan: Plan, structure: int, chunk: jax.Array, new: list[Tree]) -> Tree:
    """Sums of gradients, with those of a model chunk's blocks."""
    segments = {segment: dict(places) for segment, places in grads["segments"].items()}
    for block, held in enumerate(plan.structures[structure]):
        row = _row(plan, structure, block, chunk)
        segments[held.segment][held.place] = jax.tree.map(
            lambda total, grad, row=row: put(total, get(total, row) + grad, row),
            segments[held.segment][held.place],
            new[block],
        )
    return grads | {"segments": segments}


def _row(plan: Plan, structure: int, block: int, chunk: jax.Array) -> jax.Array | int:
    held = plan.structures[structure][block]
    if plan.table.chunks == 1:
        return held.row
    return chunk * plan.stages.rows[held.segment] + held.row
