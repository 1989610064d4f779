"""The part of the training state that says where experts lie, and how they were loaded since somebody last looked.

M blocks with experts, E experts, R rows of a stack of blocks, L experts of this rank.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from moe_jax.config import Model
from moe_jax.models.placement import by_expert, expert_group, moe_blocks
from moe_jax.parallel.grad_sync import Experts
from moe_jax.parallel.mesh import Axes
from moe_jax.parallel.pipeline import stage
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.stages import Stages

Placement = dict[str, jax.Array]


def first_placement(model: Model) -> Placement:
    """Expert e in slot e, nothing seen."""
    blocks, experts = model.block_kinds.count("moe"), model.moe.num_experts
    return {
        "slot_ME": jnp.tile(jnp.arange(experts, dtype=jnp.int32), (blocks, 1)),
        "load_ME": jnp.zeros((blocks, experts), jnp.float32),  # sums of each step's shares
        "over_M": jnp.zeros(blocks, jnp.int32),  # windows in a row in which ranks were loaded unevenly
    }


def placement_shapes(model: Model, like: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Of a placement on the mesh of another array."""
    whole = NamedSharding(like.mesh, REPLICATED)
    shapes = jax.eval_shape(partial(first_placement, model))
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for name, x in shapes.items()}


def ordered(state: dict[str, Any], shapes: Any, stages: Stages) -> dict[str, Any]:
    """A state, or a part of it, without its placement: experts in their order, sharded like `shapes`."""
    rest = {name: part for name, part in state.items() if name != "placement"}
    wanted = jax.tree.map(lambda x: x.sharding, {name: shapes[name] for name in rest})
    sort = jax.jit(partial(by_expert, stages=stages), out_shardings=wanted)
    sorted_rest: dict[str, Any] = sort(rest, state["placement"]["slot_ME"])
    return sorted_rest


def params_in_order(state: dict[str, Any], stages: Stages) -> Any:
    """A state's parameters with experts in their order, for who knows no placement."""
    if "placement" not in state:
        return state["params"]
    return by_expert({"params": state["params"]}, state["placement"]["slot_ME"], stages)["params"]


def experts_here(dims: Any, slot_ME: jax.Array | None, stages: Stages, axis: Axes) -> list[Experts | None]:
    """Which experts the parameters of this device are of, leaf by leaf; inside `shard_map`. Without experts None."""
    moe, ranks = stages.model.moe, jax.lax.axis_size(axis)
    held = moe.num_experts // ranks
    blocks = moe_blocks(stages)

    def of_group(group: tuple[int, int] | None) -> Experts | None:
        if group is None:
            return None
        rows = stages.layout[group[0]][0]
        block_R = np.zeros(rows, np.int32)  # unused rows have no gradients, so those of any block will do
        for m, (segment, place, row) in enumerate(blocks):
            if (segment, place) == group:
                block_R[row] = m
        own = rows // stages.stages
        first = jax.lax.axis_index(axis) * held
        if slot_ME is None:
            number_RL = jnp.broadcast_to(first + jnp.arange(held), (own, held))
        else:
            own_R = jax.lax.dynamic_slice_in_dim(jnp.asarray(block_R), stage() * own, own)
            expert_RE = jnp.argsort(slot_ME[own_R], axis=1)  # of each slot
            number_RL = jax.lax.dynamic_slice_in_dim(expert_RE, first, held, axis=1)
        return Experts(number_RL, moe.num_experts)

    leaves = jax.tree.leaves_with_path(dims, is_leaf=lambda leaf: isinstance(leaf, tuple))
    found = {group: of_group(group) for group in {expert_group(path) for path, _ in leaves}}
    return [found[expert_group(path)] for path, _ in leaves]
