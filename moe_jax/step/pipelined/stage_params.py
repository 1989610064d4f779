"""Read parameters and add gradients of a model chunk's blocks, in the stacked arrays of a stage."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moe_jax.config.layer_layout import GroupBlock
from moe_jax.parallel.trees import Tree
from moe_jax.step.pipelined.buffers import get, put
from moe_jax.step.pipelined.build import PipelinedPlan


def weights_of(params: Tree, plan: PipelinedPlan, blocks: Sequence[GroupBlock], chunk: jax.Array) -> dict[int, Tree]:
    """Return the parameters of each of these blocks of a model chunk."""
    weights = {}
    for block, member in enumerate(blocks):
        take = functools.partial(get, place=_row(plan, member, chunk))
        weights[block] = jax.tree.map(take, params["segments"][member.segment][member.place])
    return weights


def zero_gradients(params: Tree, plan: PipelinedPlan) -> Tree:
    """Return zeros for sums of gradients, like the parameters. Each row of blocks has separate arrays [chunks, …]."""

    def rows(leaf: jax.Array, segment: int) -> list[jax.Array]:
        shape = (plan.stages.chunks_with(segment), *leaf.shape[1:])
        return [jnp.zeros(shape, jnp.float32) for _ in range(plan.stages.rows[segment])]

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params | {"segments": {}})
    of_segments = params["segments"].items()
    apart = {number: jax.tree.map(lambda leaf, n=number: rows(leaf, n), tree) for number, tree in of_segments}
    return zeros | {"segments": apart}


def add_gradients(
    sums: Tree, plan: PipelinedPlan, blocks: Sequence[GroupBlock], chunk: jax.Array, new: Sequence[Tree]
) -> Tree:
    """Return the sums with the gradients of these blocks of a model chunk added."""
    segments = {segment: dict(places) for segment, places in sums["segments"].items()}
    for block, member in enumerate(blocks):
        place = 0 if plan.stages.chunks_with(member.segment) == 1 else chunk

        def with_row(
            grad: jax.Array, rows: list[jax.Array], row: int = member.row, place: jax.Array | int = place
        ) -> list[jax.Array]:
            total = put(rows[row], get(rows[row], place) + grad, place)
            return [*rows[:row], total, *rows[row + 1 :]]

        totals = segments[member.segment][member.place]
        segments[member.segment][member.place] = jax.tree.map(with_row, new[block], totals)
    return sums | {"segments": segments}


def stack_gradients(sums: Tree) -> Tree:
    """Return the sums stacked like the parameters."""

    def stacked(rows: list[jax.Array]) -> jax.Array:
        return jnp.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])  # chunk by chunk

    return sums | {"segments": jax.tree.map(stacked, sums["segments"], is_leaf=lambda tree: isinstance(tree, list))}


def _row(plan: PipelinedPlan, member: GroupBlock, chunk: jax.Array) -> jax.Array | int:
    if plan.stages.chunks_with(member.segment) == 1:
        return member.row
    return chunk * plan.stages.rows[member.segment] + member.row
