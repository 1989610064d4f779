"""Times of a step that runs a table of ticks: pipeline stages, or two parts of a batch beside each other.

Stages wait for each other behind every tick, so that the slowest one counts. In a tick gradients travel to the stage
before, beside the forward pass, and then activations to the next one, beside the backward pass; a tick with both
passes at once hides neither, unless weight gradients follow, beside which both travel (`step/pipelined/executor.py`).
Where sends want the links of a pass's exchanges, exchanges go first.
Gradients are summed behind the last tick.
"""

import functools
from collections.abc import Iterable

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.collective_costs import DeviceGroup
from moe_jax.plan.gradients import held_by
from moe_jax.plan.measured import MeasuredTimes
from moe_jax.plan.pass_times import ChunkTimes, PassTime, PassTimes
from moe_jax.plan.simulate import Timeline
from moe_jax.plan.stage_parameters import on_stage, sums_on_stage
from moe_jax.plan.step_times import Step
from moe_jax.plan.work import ITEM_BYTES
from moe_jax.schedule.link_order import Priority, finish_times_s
from moe_jax.schedule.pipelines.outline import Passes, outline_of


class PipelinedStep:
    """A step of a config on a cluster. Raises ConfigError if it has too few blocks, and ScheduleError."""

    def __init__(self, config: Config, cluster: Cluster, measured: MeasuredTimes):
        settings, self.parts = config.schedule, config.train.grad_accumulation
        self.step, self.stages = Step(config, cluster, measured), Stages.of(config)
        self.outline = outline_of(settings.pipeline, config.mesh.pipeline, self.parts, settings.virtual_stages)
        split = PIPELINE_FACTS[settings.pipeline].split_weight_grad
        self._sends_behind = split and self.outline.has_pairs
        self._times = PassTimes(self.step, split, self.outline.has_pairs)
        self._slot_s = functools.cache(self._seconds_of_slot)
        self._top = len(self.stages.groups) - 1

    @property
    def timeline(self) -> Timeline:
        """What the longest model chunk does with one part of the batch."""
        return self._times.timeline(max(self.stages.groups, key=len))

    @functools.cached_property
    def send_s(self) -> float:
        """Of activations, or gradients, of one part from stage to stage; the slowest pair of neighbours counts."""
        config = self.step.config
        num_bytes = self.step.tokens * config.model.hidden_size * ITEM_BYTES[config.train.compute_dtype]
        return self.step.fabric.send(num_bytes, self._neighbours)

    @property
    def _neighbours(self) -> DeviceGroup:
        mesh = self.step.mesh
        return DeviceGroup(self.stages.stages, mesh["context"] * mesh["expert"] * mesh["tensor"])

    def _sent_s(self, beside: PassTime | None, send_s: float) -> float:
        """When a send beside a pass has arrived."""
        if beside is None or not self.step.fabric.share_links(self._neighbours, self.step.experts):
            return send_s
        wanted_s = {Priority.EXPERT: beside.exchange, Priority.PIPELINE: send_s}
        return finish_times_s(wanted_s)[Priority.PIPELINE] if send_s else 0.0

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Of the whole step and its parts, as `Step.seconds`, on the stage that has most to do."""
        ticks_s, alone_s = self._ticks_s(self.send_s), self._ticks_s(0.0)
        num_ticks = sum(self.outline.ticks.values())
        work_s = [self._work_s(stage) for stage in range(self.stages.stages)]
        busiest = max(range(self.stages.stages), key=work_s.__getitem__)
        compute, exchange = self._busy(busiest)
        sums = self._sums_s()
        waiting = max(work_s[busiest] - compute, 0.0)  # for exchanges inside a pass
        return {
            "step": ticks_s + sums,
            "compute": compute,
            "exchange": exchange + 2 * num_ticks * self.send_s,
            "sums": sums,
            "exposed": waiting + ticks_s - alone_s + sums,
            "idle": alone_s - compute - waiting,
        }

    def _ticks_s(self, send_s: float) -> float:
        """Of all ticks, each as long as its longest slot."""
        return sum(
            count * max(self._slot_s(stage, passes, send_s) for stage, passes in enumerate(tick))
            for tick, count in self.outline.ticks.items()
        )

    def _work_s(self, stage: int) -> float:
        return sum(count * self._slot_s(stage, tick[stage], 0.0) for tick, count in self.outline.ticks.items())

    def _seconds_of_slot(self, stage: int, passes: Passes, send_s: float) -> float:
        ahead, behind = (self._chunk(stage, chunk) for chunk in (passes.forward, passes.backward))
        ends, weight_s = self._times.ends, 0.0
        before_s = ends.embedding if self._group(stage, passes.forward) == 0 else 0.0
        head_s = ends.head if self._group(stage, passes.backward) == self._top else 0.0
        after_s = ends.embedding_back if self._group(stage, passes.backward) == 0 else 0.0
        if passes.weight is not None:
            weight_s = self._times.chunk(self.stages.groups[self.stages.group(stage, passes.weight)]).weight.seconds
        together_s = ahead.together.seconds if ahead and behind and self._alike(stage, passes) else None
        ahead_s, behind_s = (ahead.forward.seconds if ahead else 0.0), (behind.backward.seconds if behind else 0.0)
        if self._sends_behind:
            of_blocks = ahead_s + behind_s if together_s is None else together_s
            return before_s + head_s + of_blocks + max(after_s + weight_s, send_s)
        if together_s is not None:
            return max(before_s, send_s) + head_s + together_s + max(after_s, send_s)
        arrived_s = [
            self._sent_s(chunk and getattr(chunk, name), send_s)
            for chunk, name in ((ahead, "forward"), (behind, "backward"))
        ]
        return max(before_s + ahead_s, arrived_s[0]) + max(head_s + behind_s + after_s + weight_s, arrived_s[1])

    def _chunk(self, stage: int, chunk: int | None) -> ChunkTimes | None:
        group = self._group(stage, chunk)
        return None if group is None else self._times.chunk(self.stages.groups[group])

    def _group(self, stage: int, chunk: int | None) -> int | None:
        return None if chunk is None else self.stages.group(stage, chunk)

    def _alike(self, stage: int, passes: Passes) -> bool:
        """Whether both chunks have the same structure: only those run beside each other."""
        ahead, behind = (self._group(stage, chunk) for chunk in (passes.forward, passes.backward))
        assert ahead is not None
        assert behind is not None
        return self.stages.groups[ahead] == self.stages.groups[behind]

    def _busy(self, stage: int) -> tuple[float, float]:
        """Seconds in which a stage computes, and in which its passes exchange."""
        compute = exchange = 0.0
        for number in range(self.stages.chunks):
            group = self.stages.group(stage, number)
            chunk, ends = self._times.chunk(self.stages.groups[group]), self._times.ends
            passes = (chunk.forward, chunk.backward, chunk.weight)
            compute += sum(each.compute for each in passes) + (ends.head if group == self._top else 0.0)
            compute += ends.embedding + ends.embedding_back if group == 0 else 0.0
            exchange += sum(each.exchange for each in passes)
        return self.parts * compute, self.parts * exchange

    def _sums_s(self) -> float:
        """Of gradients: a stage's own over its devices, those of the model's ends over all."""
        return sum(each.seconds(self.step.fabric) for each in sums_on_stage(self.step.config, self.step.mesh))


def parameters_by_group(config: Config) -> Iterable[tuple[DeviceGroup, float]]:
    """Parameters of a device, by the devices that cut their moments: all of its stage that have the same ones."""
    for owned in on_stage(config):
        yield from held_by(owned, config, config.mesh.sizes).items()
