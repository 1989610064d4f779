"""The placement in the training state: where experts are stored, and their load since the rebalancer last ran.

M blocks with experts, E experts, S positions for them, R rows of a stack of blocks, L positions of this rank.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from moe_jax.config import Config, ModelConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.models.placement import by_expert, by_slot, expert_group, first_experts, first_slots
from moe_jax.parallel.expert_transfer import all_reduce_replicated_experts
from moe_jax.parallel.grad_sync import Experts
from moe_jax.parallel.host_memory import to_device
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.parallel.trees import Grads, Params
from moe_jax.step.context import State, StepContext
from moe_jax.step.losses import Metrics
from moe_jax.step.optimizers.protocol import unless_bad
from moe_jax.step.stage_rows import UNUSED, moe_of_row, own_rows

Placement = dict[str, jax.Array]


def first_placement(
    model: ModelConfig, ranks: int = 1, replicas: int = 0, speed_P: Sequence[float] | None = None
) -> Placement:
    """Return the initial placement: experts in order, loads zero. With `replicas`, each rank has that many
    free positions or, if ranks have different speeds, all of them together (`first_experts`).
    """
    blocks, experts = model.block_kinds.count("moe"), model.moe.num_experts
    name = "expert_MS" if replicas else "slot_ME"
    return {
        name: jnp.tile(jnp.asarray(first_experts(experts, ranks, replicas, speed_P)), (blocks, 1)),
        "load_ME": jnp.zeros((blocks, experts), jnp.float32),  # sum over steps of each expert's share of the tokens
        "over_M": jnp.zeros(blocks, jnp.int32),  # consecutive windows with uneven load over ranks
    }


def placement_shapes(model: ModelConfig, slots: int, like: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a placement with `slots` positions per block, replicated on the mesh of `like`."""
    whole = NamedSharding(like.mesh, REPLICATED)
    shapes = jax.eval_shape(partial(first_placement, model, replicas=slots - model.moe.num_experts))
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for name, x in shapes.items()}


def slots_of(state: Mapping[str, Any]) -> jax.Array | None:
    """Return the placement of experts in each block, `slot_ME` or `expert_MS` (`models/placement.py`), or None if they
    are in order.
    """
    placement = state.get("placement")
    return placement and placement["expert_MS" if "expert_MS" in placement else "slot_ME"]


def fits(placement: Placement, config: Config, ranks: int) -> bool:
    """Whether a placement is valid for a config whose experts are sharded over `ranks` ranks."""
    experts, where = config.model.moe.num_experts, np.asarray(slots_of({"placement": placement}))
    if where.shape[1] != experts + config.replicas * ranks:
        return False
    of_ranks = np.sort(where.reshape(len(where), ranks, -1), axis=-1)
    twice = (of_ranks[..., 1:] == of_ranks[..., :-1]) & (of_ranks[..., 1:] < experts)
    return not twice.any()


def with_first_placement(state: State, shapes: State, config: Config, ranks: int) -> State:
    """Add the initial placement to a state whose experts are in order; the result is sharded like `shapes`."""
    wanted = jax.tree.map(lambda x: x.sharding, shapes)
    first = partial(first_placement, config.model, ranks, config.replicas, config.rank_speeds)
    placement = jax.jit(first, out_shardings=wanted["placement"])()
    if config.replicas:
        expert_S = first_experts(config.model.moe.num_experts, ranks, config.replicas, config.rank_speeds)
        rest = {name: wanted[name] for name in state}
        state = jax.jit(partial(by_slot, expert_S=expert_S), out_shardings=rest)(state)
    return state | {"placement": placement}


def ordered(state: State, shapes: State, stages: Stages) -> State:
    """Return a state, or a part of it, with its experts in order and without its placement, sharded like `shapes`."""
    rest = {name: part for name, part in state.items() if name != "placement"}
    wanted = jax.tree.map(lambda x: x.sharding, {name: shapes[name] for name in rest})

    def sort(rest: State, slots: Any) -> State:
        sorted_rest: State = by_expert(jax.tree.map(to_device, rest), slots, stages=stages)
        return sorted_rest

    on_mesh: State = jax.jit(sort, out_shardings=wanted)(rest, slots_of(state))
    return on_mesh


def params_in_order(state: State, stages: Stages) -> Params:
    """Return a state's parameters with experts in order, for readers that do not use a placement."""
    params: Params = state["params"]
    slot_ME = slots_of(state)
    return params if slot_ME is None else by_expert({"params": params}, slot_ME, stages)["params"]


def with_load_added(state: State, metrics: Metrics, is_good: jax.Array) -> dict[str, Placement]:
    """Return the placement of a state, if it has one, with the expert loads of a step added, unless the step
    was bad.
    """
    if "placement" not in state:
        return {}
    load_ME = state["placement"]["load_ME"]
    load_ME = unless_bad(is_good, load_ME + metrics["expert_load"], load_ME)
    return {"placement": state["placement"] | {"load_ME": load_ME}}


def experts_here(slot_ME: jax.Array | None, context: StepContext) -> list[Experts | None]:
    """Return, for each parameter leaf on this device, which experts it belongs to; None for leaves without experts.
    Runs inside `shard_map`.
    """
    dims, stages, axis = context.dims, context.stages, context.compute.expert_axis
    experts, ranks = stages.model.moe.num_experts, jax.lax.axis_size(axis)
    own = (experts if slot_ME is None else slot_ME.shape[1]) // ranks

    def of_group(group: tuple[int, int] | None) -> Experts | None:
        if group is None:
            return None
        first = jax.lax.axis_index(axis) * own
        if slot_ME is None:
            number_RL = jnp.broadcast_to(first + jnp.arange(own), (_rows_here(group, stages), own))
        else:
            number_RS = _counted_once(_placement_here(slot_ME, group, stages), experts)
            number_RL = jax.lax.dynamic_slice_in_dim(number_RS, first, own, axis=1)
        return Experts(number_RL, experts)

    leaves = jax.tree.leaves_with_path(dims, is_leaf=lambda leaf: isinstance(leaf, tuple))
    found = {group: of_group(group) for group in dict.fromkeys(expert_group(path) for path, _ in leaves)}
    return [found[expert_group(path)] for path, _ in leaves]


def _counted_once(slot_RE: jax.Array, experts: int) -> jax.Array:
    """Return the expert at each position. Free ones and further copies of an expert get distinct numbers from E on."""
    if slot_RE.shape[1] == experts:
        return jnp.argsort(slot_RE, axis=1)
    slots = jnp.arange(slot_RE.shape[1])
    is_first_RS = (first_slots(slot_RE, experts)[:, :, None] == slots).any(axis=1)
    return jnp.where(is_first_RS, slot_RE, experts + slots)


def with_copies_summed(grads: Grads, expert_MS: jax.Array | None, context: StepContext) -> Grads:
    """Sum the gradients of an expert's copies; `grads` are already summed over devices. Runs inside `shard_map`.

    Returns the gradients unchanged if experts have no copies (`migration.replicas`).
    """
    if expert_MS is None or not context.config.replicas:
        return grads
    stages, axis, platform = context.stages, context.compute.expert_axis, context.compute.platform
    leaves = jax.tree.leaves_with_path(grads)
    groups = {group for path, _ in leaves if (group := expert_group(path)) is not None}
    new: dict[Any, jax.Array] = {}
    for group in sorted(groups):
        paths, of_group = zip(*((path, leaf) for path, leaf in leaves if expert_group(path) == group), strict=True)
        others = [new.get(path, leaf) for path, leaf in leaves if path not in paths]
        expert_RS = _placement_here(expert_MS, group, stages)
        summed = all_reduce_replicated_experts(
            list(of_group), expert_RS, stages.model.moe.num_experts, axis, platform, others
        )
        new |= dict(zip(paths, summed, strict=True))
    summed_grads: Grads = jax.tree.map_with_path(lambda path, leaf: new.get(path, leaf), grads)
    return summed_grads


def _placement_here(slot_ME: jax.Array, group: tuple[int, int], stages: Stages) -> jax.Array:
    """Return the placement of the blocks in this pipeline stage's rows of a stack."""
    block_R = moe_of_row(stages, *group)
    return slot_ME[own_rows(np.where(block_R == UNUSED, 0, block_R))]  # unused rows have no gradients


def _rows_here(group: tuple[int, int], stages: Stages) -> int:
    return stages.layout[group[0]][0] // stages.stages
