"""Build the plan of a scheduled step: the order of its tasks, and how each owner's gradients are summed.

An owner is a group of parameters whose gradients are reduced together: the embedding (0), a block (its number + 1), or
the last norms with the head.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.config import Config, ModelConfig
from moe_jax.config.layer_layout import segments
from moe_jax.distributed.processes import read_alike
from moe_jax.models.parameters import param_dims, param_shapes
from moe_jax.models.placement import slot_shapes
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import partitions
from moe_jax.parallel.trees import OF_HEAD, ShardSpecs, Tree
from moe_jax.parallel.zero import unsharded_specs
from moe_jax.plan.costs import order_times
from moe_jax.plan.measured import read_times
from moe_jax.plan.param_gathers import gathered_bytes
from moe_jax.plan.rates import with_rates_of
from moe_jax.plan.task_times import TaskStage
from moe_jax.schedule.actions import is_reduction
from moe_jax.schedule.build import make_schedule, step_shape, step_streams
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.scanned import ScannedBlocks, ScannedSchedule, make_scanned
from moe_jax.schedule.schedule import Schedule
from moe_jax.step.optimizer import state_shard_specs
from moe_jax.step.scheduled.reduce_groups import Reduction


@dataclasses.dataclass(frozen=True)
class ScheduledPlan:
    """A schedule, and how the gradients of each owner are summed over devices."""

    schedule: Schedule
    reductions: tuple[Reduction, ...]  # by owner: embed, the blocks, head
    shard_specs: ShardSpecs  # how reduced gradients are sharded over devices
    scanned: ScannedSchedule | None  # the same tasks, with equal groups of blocks in a scan; None: no scan

    def without_reductions(self) -> "ScheduledPlan":
        """Return the same plan without gradient sums: gradients stay local to each device."""
        actions = tuple(action for action in self.schedule.actions if not is_reduction(action))
        nothing = dataclasses.replace(self.reductions[0], groups=(), buckets=())
        return ScheduledPlan(
            dataclasses.replace(self.schedule, actions=actions),
            (nothing,) * len(self.reductions),
            unsharded_specs(self.shard_specs),
            self.scanned and self.scanned.without_reductions(),
        )


def make_plan(config: Config, mesh: Mesh) -> ScheduledPlan:
    """Build the schedule that a config selects, and the buckets of its reductions. Raises ScheduleError or
    ConfigError.
    """
    config = with_rates_of(config, mesh.devices.flat[0].device_kind)
    settings, compute = config.schedule, ComputeConfig.of(config, mesh)
    platform = compute.platform
    reductions = reductions_of(config, mesh, settings.bucket_cap_mb if settings.grad_reduce == "bucketed" else None)
    shape = step_shape(config, mesh.shape, [len(reduction.buckets) for reduction in reductions])
    sent = [reduction.sent_bytes(mesh.shape) for reduction in reductions]
    gathered = gathered_bytes(config, mesh.shape)
    times = order_times(config, mesh.shape, platform, sent, measured_times(config), gathered)
    scanned, stream_of = None, step_streams(config, mesh.shape, platform, compute.exchanges_inside_nodes)
    if scan_blocks := ScannedBlocks.of_config(config):
        schedule, scanned = make_scanned(
            *(settings.policy, shape, scan_blocks, times.of(shape), stream_of), gathers_early=platform == "gpu"
        )
    else:
        schedule = make_schedule(settings.policy, shape, times.of(shape), stream_of)
    check(schedule)
    return ScheduledPlan(schedule, reductions, state_shard_specs(config, mesh), scanned)


def reductions_of(config: Config, mesh: Mesh, bucket_cap_mb: float | None) -> tuple[Reduction, ...]:
    """Return how the gradients of each owner are summed, in the order embedding, blocks, head."""
    model, platform = config.model, ComputeConfig.of(config, mesh).platform
    specs, shard_specs = partitions(param_dims(model), expert_axis(config.mesh)), state_shard_specs(config, mesh)

    def local(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(shape.shape), shape.dtype)

    shapes = jax.tree.map(local, slot_shapes(param_shapes(model), config.expert_slots(mesh.shape)), specs)
    return tuple(
        Reduction.of(
            owned(shapes, model, owner, lambda leaf, _: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)),
            owned(specs, model, owner, lambda spec, _: PartitionSpec(*spec[1:])),
            owned(shard_specs, model, owner, lambda shard_spec, _: shard_spec.unstacked()),
            mesh.shape,
            bucket_cap_mb,
            powers_of_two=platform == "tpu",
        )
        for owner in range(model.num_blocks + 2)
    )


def measured_times(config: Config) -> Mapping[str, TaskStage]:
    """Read measured task times from a file; all processes use the same ones, since collectives issued in different
    orders would deadlock.
    """
    path = config.schedule.task_times
    if path is None:
        return {}
    kinds = config.model.block_kinds
    return read_alike(lambda: read_times(path, kinds), f"schedule.task_times={path}").compute


def scanned_blocks(config: Config) -> tuple[int, ScannedBlocks | None]:
    """Return the segment with most periods, and its blocks as scan iterations, or None if a loop is not worthwhile."""
    return ScannedBlocks.of_longest(segments(config.model), config.schedule.unroll)


def owned(tree: Tree, model: ModelConfig, owner: int, take: Callable[[Any, int], Any]) -> Tree:
    """Return an owner's part of a tree like the parameters; `take(leaf, period)` selects a block's share of a stacked
    leaf.
    """
    if owner == 0:
        return tree["embedding"]
    if owner == model.num_blocks + 1:
        return {name: tree[name] for name in OF_HEAD if name in tree}
    number, period, place = places(model)[owner - 1]
    return jax.tree.map(lambda leaf: take(leaf, period), tree["segments"][number][place])


@functools.cache
def places(model: ModelConfig) -> list[tuple[int, int, int]]:
    """Return the segment, the period and the place in the period of each block."""
    return [
        (number, period, place)
        for number, segment in enumerate(segments(model))
        for period in range(segment.repeats)
        for place in range(len(segment.kinds))
    ]
