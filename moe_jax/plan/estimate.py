"""How long a step of a config takes on a cluster, and what it costs.

Models deeper than a few periods of blocks are simulated with few of
them, more until the last one takes what the one before took: so does each further one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from moe_jax.config import Config
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.collective_costs import Fabric
from moe_jax.plan.gradients import parts_of
from moe_jax.plan.measured import MeasuredTimes, read_times
from moe_jax.plan.pipelined import PipelinedStep, parameters_by_group
from moe_jax.plan.resources import train_flops_per_token
from moe_jax.plan.simulate import Timeline
from moe_jax.plan.step_times import Step

_PERIODS = 4  # that are simulated, and up to twice as many where they differ
_ALIKE = 0.02
_UPDATE_BYTES = 28  # per parameter: gradient, parameter and both moments are read, three of them written
_PARAMETER_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Seconds of a step, by what it is made of. Communication that is hidden counts, too."""

    compute: float
    exchange: float  # all-to-alls, with what tensor ranks gather behind them; sends between pipeline stages
    sums: float  # of gradients
    update: float  # of the optimiser
    exposed: float  # communication with nothing computed beside it
    idle: float = 0.0  # of the pipeline stage that has most to do


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step of a config on a cluster."""

    config: Config
    cluster: Cluster
    step_s: float
    busy: Busy
    timeline: Timeline  # of a model with few periods; in a pipeline, of a stage and one part of the batch
    leaves_node: bool  # whether exchanges go between nodes
    algorithm: str  # of the exchanges

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.config.train.batch_size * self.config.data.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @cached_property
    def mfu(self) -> float:
        """Model FLOP utilisation: nothing recomputed or padded counts, against the devices' peak."""
        flops = self.tokens * train_flops_per_token(self.config.model, self.config.data.seq_len)
        return flops / (self.step_s * self.cluster.devices * self.cluster.device.matrix_flops_per_s)

    @property
    def joules_per_token(self) -> float | None:
        """At full load all the time."""
        return None if self.cluster.watts is None else self.cluster.watts / self.tokens_per_s

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        price = self.cluster.dollars_per_hour
        return None if price is None else price / 3600 * 1e9 / self.tokens_per_s


def estimate(config: Config, cluster: Cluster) -> Estimate:
    """Simulate a step; the mesh of `config` has the cluster's devices, none of its axes -1.

    Raises ScheduleError, and ConfigError if stages have too few blocks.
    """
    if config.step_facts.has_ticks:
        return _pipelined(config, cluster)
    moe, blocks = config.model.moe, config.model.num_layers
    bottom, period = (moe.first_k_dense_replace, moe.moe_layer_freq) if moe.num_experts else (0, 1)
    periods, rest = divmod(blocks - bottom, period)
    measured = _measured(config)

    def with_periods(count: int) -> Step:
        model = dataclasses.replace(config.model, num_layers=bottom + count * period + rest)
        return Step(dataclasses.replace(config, model=model), cluster, measured)

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
        # one that hid more than the one before is not followed by others that hide ever more
        slope |= {"exposed": max(slope["exposed"], 0.0), "step": max(slope["step"], slope["compute"])}
        whole = {name: value + (periods - count) * slope[name] for name, value in whole.items()}
    return _of(config, cluster, steps[-1], steps[-1].timeline, whole)


def _last_ones_alike(steps: Sequence[Step]) -> bool:
    """Whether the last period took as long as the one before."""
    before_s, last_s = (behind.seconds["step"] - step.seconds["step"] for step, behind in pairwise(steps[-3:]))
    return abs(last_s - before_s) <= _ALIKE * last_s


def _pipelined(config: Config, cluster: Cluster) -> Estimate:
    pipelined = PipelinedStep(config, cluster, _measured(config))
    return _of(config, cluster, pipelined.step, pipelined.timeline, pipelined.seconds)


def _of(config: Config, cluster: Cluster, step: Step, timeline: Timeline, whole: dict[str, float]) -> Estimate:
    """With the optimiser's update behind the seconds of the whole step."""
    update_s = step.measured.rest_s
    if update_s is None:
        update_s = _update_seconds(config, cluster, step.fabric)
    parts = {name: seconds for name, seconds in whole.items() if name != "step"}
    return Estimate(
        config=config,
        cluster=cluster,
        step_s=whole["step"] + update_s,
        busy=Busy(update=update_s, **parts),
        timeline=timeline,
        leaves_node=step.fabric.leaves_node(step.experts),
        algorithm=step.algorithm(timeline.schedule.shape),
    )


def _measured(config: Config) -> MeasuredTimes:
    path = config.schedule.task_times
    return read_times(path, config.model.block_kinds) if path else MeasuredTimes({})


def _update_seconds(config: Config, cluster: Cluster, fabric: Fabric) -> float:
    """Of the optimiser; with ZeRO each device updates its own part of parameters, and the parts are gathered."""
    parts, updated, gathered_s = parts_of(config, config.mesh.sizes), 0.0, 0.0
    for group, count in parameters_by_group(config):
        updated += count / parts[group]
        gathered_s += fabric.ring(count * (1 - 1 / parts[group]) * _PARAMETER_BYTES, group)
    return _UPDATE_BYTES * updated / cluster.device.memory_bytes_per_s + gathered_s
