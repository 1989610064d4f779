"""Times of a step that runs a table of ticks: pipeline stages, or two concurrent parts of a batch.

Stages wait for each other after every tick, so the slowest one counts. In a tick gradients are sent to the previous
stage, concurrently with the forward pass, and then activations to the next one, concurrently with the backward pass. A
tick with both passes at once hides neither transfer, unless weight gradients follow, which then overlap with both
(`step/pipelined/executor.py`). If sends need the same links as the exchanges of a pass, exchanges go first. Gradients
are summed after the last tick.
"""

import functools
import operator

import numpy as np
import numpy.typing as npt

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.plan.caching import cached_method
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.collective_costs import DeviceGroup
from moe_jax.plan.measured import MeasuredTimes
from moe_jax.plan.pass_times import ChunkTimes, PassTime, PassTimes
from moe_jax.plan.simulate import Timeline
from moe_jax.plan.stage_parameters import stage_sums
from moe_jax.plan.step_times import Step
from moe_jax.plan.work import ITEM_BYTES
from moe_jax.schedule.link_order import Priority, finish_times_s
from moe_jax.schedule.pipelines.outline import StagePasses, outline_of, tick_slots
from moe_jax.schedule.shape import StepShape


class PipelinedStep:
    """A pipelined step of a config on a cluster. Raises ScheduleError, and ConfigError if there are too few blocks."""

    def __init__(self, config: Config, cluster: Cluster, measured: MeasuredTimes, passes: type[PassTimes] = PassTimes):
        settings, self.parts = config.schedule, config.train.grad_accumulation
        self.step, self.stages = Step(config, cluster, measured), Stages.of(config)
        table = settings.pipeline, config.mesh.pipeline, self.parts, settings.virtual_stages
        self.outline, self._slots = outline_of(*table), tick_slots(*table)
        split = PIPELINE_FACTS[settings.pipeline].split_weight_grad
        self._sends_after_passes = split and self.outline.has_pairs
        self._times = passes(self.step, split, self.outline.has_pairs)
        self._top = len(self.stages.groups) - 1

    @property
    def timeline(self) -> Timeline:
        """The timeline of the longest model chunk with one part of the batch."""
        return self._times.timeline(max(self.stages.groups, key=len))

    @property
    def shape_of_period(self) -> StepShape:
        """The shape of one period of blocks, whose tasks have as many parts as those of a model chunk."""
        return self._times.shape_of_period

    @functools.cached_property
    def send_s(self) -> float:
        """Seconds to send one part's activations, or gradients, between stages. The slowest pair of stages counts."""
        config = self.step.config
        num_bytes = self.step.tokens * config.model.hidden_size * ITEM_BYTES[config.train.compute_dtype]
        return self.step.collectives.send(num_bytes, self._neighbours)

    @property
    def _neighbours(self) -> DeviceGroup:
        mesh = self.step.mesh
        return DeviceGroup(self.stages.stages, mesh["context"] * mesh["expert"] * mesh["tensor"])

    @functools.cached_property
    def _sends_share_links(self) -> bool:
        return self.step.collectives.share_links(self._neighbours, self.step.experts)

    def _sent_s(self, concurrent: PassTime | None, send_s: float) -> float:
        """Seconds until a send that runs concurrently with a pass has arrived."""
        if concurrent is None or not self._sends_share_links:
            return send_s
        wanted_s = {Priority.EXPERT: concurrent.exchange, Priority.PIPELINE: send_s}
        return finish_times_s(wanted_s)[Priority.PIPELINE] if send_s else 0.0

    @functools.cached_property
    def stage_seconds(self) -> list[float]:
        """Seconds of the passes of each stage, as if it never waited for another one."""
        counts = self.outline.ticks.values()
        return [sum(map(operator.mul, counts, column)) for column in self._slots_s(0.0).T.tolist()]

    @functools.cached_property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self._ticks_s(self.send_s) + self._sums_s

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the whole step and its parts on the stage with most work, with the names of `Step.seconds`."""
        ticks_s, alone_s = self._ticks_s(self.send_s), self._ticks_s(0.0)
        num_ticks = sum(self.outline.ticks.values())
        work_s = self.stage_seconds
        busiest = max(range(self.stages.stages), key=work_s.__getitem__)
        compute, exchange = self._busy(busiest)
        sums = self._sums_s
        waiting = max(work_s[busiest] - compute, 0.0)  # for exchanges inside a pass
        return {
            "step": self.step_s,
            "compute": compute,
            "exchange": exchange + 2 * num_ticks * self.send_s,
            "sums": sums,
            "exposed": waiting + ticks_s - alone_s + sums,
            "idle": alone_s - compute - waiting,
        }

    @cached_method
    def _ticks_s(self, send_s: float) -> float:
        """Seconds of all ticks; a tick takes as long as its longest slot."""
        return sum(map(operator.mul, self.outline.ticks.values(), self._slots_s(send_s).max(axis=1).tolist()))

    def _slots_s(self, send_s: float) -> npt.NDArray[np.float64]:
        """Seconds of each tick's slots [ticks, stages]."""
        seconds = [self._slot_s(self._groups(stage, passes), send_s) for stage, passes in self._slots.slots]
        return np.array(seconds)[self._slots.index_TS]

    def _groups(self, stage: int, passes: StagePasses) -> StagePasses:
        """The groups of a slot's passes, or the first ones that are like them."""
        alike, group = self.stages.alike, self.stages.group
        return StagePasses(*(None if chunk is None else alike[group(stage, chunk)] for chunk in passes))

    @cached_method
    def _slot_s(self, groups: StagePasses, send_s: float) -> float:
        """Seconds of a slot with the passes of these groups."""
        forward, backward, weight = map(self._chunk, groups)
        ends = self._times.ends
        before_s = ends.embedding if groups.forward == 0 else 0.0
        head_s = ends.head.seconds if groups.backward == self._top else 0.0
        after_s = ends.embedding_back if groups.backward == 0 else 0.0
        weight_s = weight.weight.seconds if weight else 0.0
        together_s = None
        if forward and self._same_blocks(groups.forward, groups.backward):
            together_s = forward.together.seconds
        forward_s, backward_s = (
            forward.forward.seconds if forward else 0.0,
            backward.backward.seconds if backward else 0.0,
        )
        if self._sends_after_passes:
            blocks_s = forward_s + backward_s if together_s is None else together_s
            return before_s + head_s + blocks_s + max(after_s + weight_s, send_s)
        if together_s is not None:
            return max(before_s, send_s) + head_s + together_s + max(after_s, send_s)
        arrived_s = [
            self._sent_s(chunk and getattr(chunk, name), send_s)
            for chunk, name in ((forward, "forward"), (backward, "backward"))
        ]
        return max(before_s + forward_s, arrived_s[0]) + max(head_s + backward_s + after_s + weight_s, arrived_s[1])

    @cached_method
    def _chunk(self, group: int | None) -> ChunkTimes | None:
        return None if group is None else self._times.chunk(self.stages.groups[group])

    def _same_blocks(self, one: int | None, other: int | None) -> bool:
        """Whether two groups have the same structure; only those run concurrently."""
        return one is not None and other is not None and self.stages.groups[one] == self.stages.groups[other]

    def _busy(self, stage: int) -> tuple[float, float]:
        """Seconds in which a stage computes, and in which its passes exchange."""
        compute = exchange = 0.0
        for number in range(self.stages.chunks):
            group = self.stages.group(stage, number)
            chunk, ends = self._times.chunk(self.stages.groups[group]), self._times.ends
            passes = [chunk.forward, chunk.backward, chunk.weight, *([ends.head] if group == self._top else [])]
            compute += sum(each.compute for each in passes)
            compute += ends.embedding + ends.embedding_back if group == 0 else 0.0
            exchange += sum(each.exchange for each in passes)
        return self.parts * compute, self.parts * exchange

    @functools.cached_property
    def _sums_s(self) -> float:
        """Seconds to sum gradients: a stage's own over its devices, those of embedding and head over all devices."""
        return sum(each.seconds(self.step.collectives) for each in stage_sums(self.step.config, self.step.mesh))
