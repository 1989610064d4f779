"""Estimate the duration and the cost of a config's step on a cluster.

Models deeper than a few periods of blocks are simulated with few periods, and with more until the last one takes as
long as the one before; each further period is assumed to take as long, too.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from moe_jax.config import Config, ModelConfig
from moe_jax.config.validate import check_batch_split
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.gradients import (
    groups_by_owner,
    moment_bytes,
    params_by_group,
    parts_by_owner,
    parts_of,
    shard_groups,
)
from moe_jax.plan.measured import MeasuredTimes, read_times
from moe_jax.plan.orthogonalizing import orthogonalizing_flops, sent_matrix_bytes
from moe_jax.plan.param_gathers import whole_gathers
from moe_jax.plan.pipelined import PipelinedStep
from moe_jax.plan.rank_speeds import slowest_devices
from moe_jax.plan.resources import train_flops_per_token
from moe_jax.plan.simulate import Timeline
from moe_jax.plan.stage_parameters import stage_parameters_of
from moe_jax.plan.step_times import Step
from moe_jax.schedule.shape import StepShape

_PERIODS = 4  # simulated periods; up to twice as many if they differ
_TOLERANCE = 0.02
_UPDATE_BYTES = 12  # per parameter: it and its gradient are read, and it is written


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Seconds of a step by kind of work. Hidden communication counts, too."""

    compute: float
    exchange: float  # all-to-alls and the gathers over tensor ranks after them; sends between pipeline stages
    sums: float  # of gradients over devices
    update: float  # by the optimizer
    exposed: float  # communication without concurrent computation
    idle: float = 0.0  # of the pipeline stage with most work


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one step of a config on a cluster."""

    config: Config
    cluster: Cluster
    step_s: float
    busy: Busy
    leaves_node: bool  # whether exchanges go between nodes
    algorithm: str  # of the all-to-alls
    simulated: Callable[[], Timeline] = field(repr=False, compare=False)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The timeline of the model with few periods; in a pipeline, of a stage and one part of the batch."""
        return self.simulated()

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.batch_size * self.config.data.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @functools.cached_property
    def mfu(self) -> float:
        """Model FLOP utilisation: FLOPs of the model, without recomputation and padding, over the devices' peak."""
        flops = self.tokens * train_flops_per_token(self.config.model, self.config.data.seq_len)
        return flops / (self.step_s * self.cluster.devices * self.cluster.device.matrix_flops_per_s)

    @property
    def joules_per_token(self) -> float | None:
        """Energy per token with all devices at full load; None if their power is unknown."""
        return None if self.cluster.watts is None else self.cluster.watts / self.tokens_per_s

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        price = self.cluster.dollars_per_hour
        return None if price is None else price / 3600 * 1e9 / self.tokens_per_s


def estimate(config: Config, cluster: Cluster) -> Estimate:
    """Simulate a step on a mesh of all the cluster's devices.

    Raises ScheduleError, and ConfigError for a mesh of another number of devices, a batch that does not divide over the
    mesh, or stages that have too few blocks.
    """
    _check_mesh(config, cluster)
    check_batch_split(config, config.mesh.data * config.mesh.expert)
    if config.step_facts.has_ticks:
        return _pipelined(config, cluster)
    bottom, period = _kinds_of_blocks(config.model)
    periods, rest = divmod(config.model.num_layers - bottom, period)
    measured = _measured(config)

    def with_periods(count: int) -> Step:
        model = _with_layers(config.model, bottom + count * period + rest)
        # so few blocks may make no loop, which is only refused if it should be in host memory
        schedule = dataclasses.replace(config.schedule, offload_activations=False)
        return Step(dataclasses.replace(config, model=model, schedule=schedule), cluster, measured, config.model)

    count = min(periods, _PERIODS)
    steps = [with_periods(count)]
    if periods > _PERIODS:
        steps = [with_periods(count - 2), with_periods(count - 1), *steps]
        while not _last_ones_alike(steps) and count < min(periods, 2 * _PERIODS):
            count += 1
            steps.append(with_periods(count))
    whole = steps[-1].seconds
    if periods > count:
        apart = 1 if _last_ones_alike(steps) else len(steps) - 1
        slope = {name: (whole[name] - value) / apart for name, value in steps[-1 - apart].seconds.items()}
        # if the last period hid more than the one before, further ones are not assumed to hide ever more
        slope |= {"exposed": max(slope["exposed"], 0.0), "step": max(slope["step"], slope["compute"])}
        whole = {name: value + (periods - count) * slope[name] for name, value in whole.items()}
    timeline = steps[-1].timeline
    return _of(config, cluster, steps[-1], lambda: timeline, timeline.schedule.shape, whole)


def _check_mesh(config: Config, cluster: Cluster) -> None:
    """Raise ConfigError, with the nearest mesh or cluster, unless the mesh has the cluster's devices."""
    sizes, devices = config.mesh.sizes, cluster.devices
    text = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "mesh.data=1"
    total = math.prod(abs(size) for size in sizes.values())
    if min(sizes.values()) > 0 and total == devices:
        return
    cures = [f"mesh.{axis}={size}" for axis, size in _other_sizes(config, devices)]
    if min(sizes.values()) < 0:
        problem = f"{text} is open, and {cluster.name} has {devices} device{'s' * (devices > 1)}"
        cures = cures or ["a mesh of as many"]
    else:
        problem = f"{text} is a mesh of {total} device{'s' * (total > 1)}, and {cluster.name} has {devices}"
        cures = [*cures[:1], f"a cluster of {total}"]
    raise ConfigError(f"{problem}: use {', or '.join(cures)}")


def _other_sizes(config: Config, devices: int) -> Iterator[tuple[str, int]]:
    """Sizes of one axis with which the mesh has this many devices; of the open axis, if there is one."""
    sizes = config.mesh.sizes
    axes = [axis for axis, size in sizes.items() if size < 0] or list(sizes)
    for axis in axes:
        size, rest = divmod(devices, math.prod(abs(other) for name, other in sizes.items() if name != axis))
        changed: dict[str, Any] = {axis: size}
        with contextlib.suppress(ConfigError):
            if size and not rest:
                dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **changed))
                yield axis, size


def _kinds_of_blocks(model: ModelConfig) -> tuple[int, int]:
    """The number of dense blocks at the bottom, and the blocks after which kinds, dense or with experts, repeat.

    Blocks of a kind with attention and with a recurrent layer take the same time, their mean.
    """
    moe = model.moe
    if not moe.num_experts:
        return 0, 1
    has_mixer_only = model.has_mamba and model.mamba.mixer_only_offsets  # which are dense
    period = math.lcm(moe.moe_layer_freq, model.recurrent_period) if has_mixer_only else moe.moe_layer_freq
    bottom = min(moe.first_k_dense_replace, model.num_layers)
    return bottom, max(min(period, model.num_layers - bottom), 1)


@functools.lru_cache(maxsize=64)
def _with_layers(model: ModelConfig, count: int) -> ModelConfig:
    """The same model with another number of layers: one value for all configs, as it is a key of caches."""
    return dataclasses.replace(model, num_layers=count)


def _last_ones_alike(steps: Sequence[Step]) -> bool:
    """Whether the last period took as long as the one before."""
    before_s, last_s = (deeper.seconds["step"] - step.seconds["step"] for step, deeper in pairwise(steps[-3:]))
    return abs(last_s - before_s) <= _TOLERANCE * last_s


def _pipelined(config: Config, cluster: Cluster) -> Estimate:
    pipelined = PipelinedStep(config, cluster, _measured(config))
    return _of(
        config, cluster, pipelined.step, lambda: pipelined.timeline, pipelined.shape_of_period, pipelined.seconds
    )


def _of(
    config: Config,
    cluster: Cluster,
    step: Step,
    simulated: Callable[[], Timeline],
    shape: StepShape,
    whole: dict[str, float],
) -> Estimate:
    """Add the optimizer's update to the seconds of the whole step."""
    update_s = step.measured.rest_s
    if update_s is None:
        update_s = update_seconds(config, cluster, step.collectives)
    parts = {name: seconds for name, seconds in whole.items() if name != "step"}
    return Estimate(
        config=config,
        cluster=cluster,
        step_s=whole["step"] + update_s,
        busy=Busy(update=update_s, **parts),
        leaves_node=step.collectives.leaves_node(step.experts),
        algorithm=step.algorithm(shape),
        simulated=simulated,
    )


def _measured(config: Config) -> MeasuredTimes:
    path = config.schedule.task_times
    return read_times(path, config.model.block_kinds) if path else MeasuredTimes({})


def update_seconds(config: Config, cluster: Cluster, collectives: CollectiveCosts) -> float:
    """Seconds of the optimizer. With ZeRO each device updates its own shard of parameters, and shards are gathered,
    for stage 3 before they are used.

    Moments are read and written. Muon's iterations count by their products, and by the exchanges of shards for whole
    matrices and back, over the devices that share them by ZeRO and over tensor ranks.
    """
    mesh, (device, *_) = config.mesh.sizes, slowest_devices(config, cluster)
    parts, hybrid, updated, gathered_s = parts_of(config, mesh), shard_groups(config, mesh), 0.0, 0.0
    for owned in stage_parameters_of(config):
        updated += sum(count / parts[group] for group, count in params_by_group(owned, config, mesh).items())
        if config.param_gather != "none":  # the step's tasks gather
            continue
        for group, num_bytes in whole_gathers(owned, config, mesh).items():
            devices = hybrid[group].shards if hybrid else group
            gathered_s += collectives.ring((1 - 1 / parts[group]) * num_bytes, devices)
    moved = _UPDATE_BYTES * updated + 2 * moment_bytes(stage_parameters_of(config), config, mesh)
    # products in float32 do not round their operands
    kind = "exact" if config.optimizer.products_dtype(device.platform) == "float32" else "bfloat16"
    share = device.rate_shares.of(kind)
    rate = device.matrix_flops_per_s * device.matrix_efficiency * share
    products_s = orthogonalizing_flops(config, mesh) / rate
    return (
        moved / device.copied_bytes_per_s + products_s + gathered_s + _matrix_exchanges_s(config, cluster, collectives)
    )


def _matrix_exchanges_s(config: Config, cluster: Cluster, collectives: CollectiveCosts) -> float:
    if not config.optimizer.facts.orthogonalizes:
        return 0.0
    mesh = config.mesh.sizes
    over_tensor = {"heads_and_hidden": mesh["tensor"], "expert": config.mesh.expert_tensor_ranks(mesh)}
    parts, groups = parts_by_owner(config, mesh), groups_by_owner(config, mesh)
    total_s = 0.0
    for owner, num_bytes in sent_matrix_bytes(config, cluster.device.platform, mesh).items():
        sharing = [groups[owner]] if parts[owner] > 1 else []
        sharing += [DeviceGroup(over_tensor[owner], 1)] if over_tensor.get(owner, 1) > 1 else []
        total_s += sum(2 * collectives.exchange(num_bytes, group, "flat").seconds for group in sharing)
    return total_s
