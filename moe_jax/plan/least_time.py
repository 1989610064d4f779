"""A lower bound of a step's time, without a simulation: a search skips configs whose bound exceeds a known step.

Two bounds of a pass hold for every schedule, however its tasks overlap: compute takes as long as all its tasks, and so
does communication, whose exchanges, gathers of parameters and sums of gradients share a stream. Compute tasks are split
as the config splits them, since many small ones take longer than a whole one, and exchanges are not split: their parts
take hardly less together (`_SLACK`). A third bound holds if only a block's experts and weight gradients may overlap
with its exchanges, because all of a part of the batch passes attention before its rows are sent: the first part of a
dispatch, and the last one of a combine, then overlap with no experts.

Gathers that start when the block before has computed (`param_gather="block"`) are waited for, as is every sum that
follows the backward pass (`grad_reduce="end"`).
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from moe_jax.config import Config
from moe_jax.config.layer_layout import GroupBlock, Stages
from moe_jax.config.registry import POLICY_FACTS
from moe_jax.plan.caching import cached_method
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.estimate import update_seconds
from moe_jax.plan.pass_times import ChunkTimes, Ends, PassTime, PassTimes, sum_of, with_forward_again
from moe_jax.plan.pipelined import PipelinedStep
from moe_jax.plan.step_times import Step
from moe_jax.schedule.actions import Action
from moe_jax.schedule.build import make_shape

# By which estimates may fall below a bound: those of deep models are extrapolated from a few blocks, and tiles of the
# products of a part of the batch may leave fewer units idle.
_SLACK = 0.05
_ENDS = ("embed", "head")
_OPS = {"moe": ("attend", "expert"), "dense": ("dense",)}


def least_step_s(config: Config, cluster: Cluster) -> float:
    """Seconds that a step takes at least, by the same costs as its estimate; 0 if these are measured."""
    if _is_measured(config, cluster):
        return 0.0
    step = Step(config, cluster)
    if config.step_facts.has_ticks:
        seconds = PipelinedStep(config, cluster, step.measured, LeastPassTimes).step_s
    else:
        seconds = _BlockTimes(step).step_s(config.model.block_kinds) + step.adding_parts_s
    return (1 - _SLACK) * (seconds + update_seconds(config, cluster, step.collectives))


def least_work_s(config: Config, cluster: Cluster, most_parts: int) -> float:
    """Seconds that the config's compute and exchanges take at least, in as many parts of the batch or up to
    `most_parts`: on the average stage or the one with most work, and until the other stages have something to do.

    Neither sends, sums of gradients nor the update count, so that the bound holds for all ways to overlap and to save
    memory.
    """
    if _is_measured(config, cluster):
        return 0.0
    blocks, order = _BlockTimes(Step(config, cluster)), config.schedule
    stages = _blocks_of(Stages.of(config))
    work_s = [blocks.work_s(kinds, ends) for kinds, ends in stages]
    # the first pass goes through all stages, and so does the last; passes of weight gradients may run meanwhile
    waits = not order.pipeline_facts.split_weight_grad
    passes_s = [waits * blocks.compute_s(kinds, "FB") / (order.virtual_stages * most_parts) for kinds, _ in stages]
    longest_s = sum(work_s) / len(stages) + sum(passes_s) * (len(stages) - 1) / len(stages)
    for stage, own_s in enumerate(work_s):
        below_s = sum(passes_s[:stage]) if order.virtual_stages == 1 else 0.0
        longest_s = max(longest_s, own_s + below_s)
    return (1 - _SLACK) ** 2 * config.train.grad_accumulation * longest_s


@functools.lru_cache(maxsize=64)
def _blocks_of(stages: Stages) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """The kinds of the blocks of every pipeline stage, with the ends of the model that it has."""
    found: list[tuple[list[str], list[str]]] = [([], []) for _ in range(stages.stages)]
    for number, group in enumerate(stages.groups):
        found[number % stages.stages][0].extend(block.kind for block in group)
    found[-1][0].extend(block.kind for block in stages.mtp)
    for stage, end in zip((0, -1), _ENDS, strict=True):
        found[stage][1].append(end)
    return tuple((tuple(kinds), tuple(ends)) for kinds, ends in found)


def _is_measured(config: Config, cluster: Cluster) -> bool:
    """Whether times are measured: tasks, products and exchanges may then take less in parts than as a whole."""
    return config.schedule.task_times is not None or bool(cluster.device.curves or cluster.curves)


class LeastPassTimes(PassTimes):
    """Bounds of the durations of passes, in place of simulated ones."""

    def __init__(self, step: Step, split: bool, pairs: bool):
        super().__init__(step, split, pairs)
        self._blocks = _BlockTimes(step)

    def chunk(self, group: Sequence[GroupBlock]) -> ChunkTimes:
        """The least durations of a chunk with these blocks."""
        return self._least(tuple(block.kind for block in group))

    @functools.cached_property
    def ends(self) -> Ends:
        """The least durations of embedding and head."""
        model, seconds = self._step.config.model, self._blocks.seconds
        added_s = self._step.adding_s(model.hidden_size * model.vocab_size)
        head_s, passes = seconds("head", "FBW") + added_s, list[PassTime]()
        if model.has_mtp:
            kinds = self._segments[-1].kinds
            head_s += self._added_s(kinds)
            passes = [self._blocks.pass_time(kinds, "F"), self._blocks.pass_time(kinds, "B", weights=True)]
        head = sum_of(PassTime(head_s, head_s, 0.0), *passes)
        return Ends(seconds("embed", "F"), head, seconds("embed", "B") + added_s)

    @cached_method
    def _least(self, kinds: tuple[str, ...]) -> ChunkTimes:
        blocks, added_s = self._blocks, self._added_s(kinds)
        forward, backward = blocks.pass_time(kinds, "F"), blocks.pass_time(kinds, "B", weights=not self._split)
        both_s = forward.compute + backward.compute + added_s
        exchange_s = forward.exchange + backward.exchange
        weight_s = blocks.compute_s(kinds, "W") + added_s if self._split else 0.0
        in_backward_s = 0.0 if self._split else added_s
        found = ChunkTimes(
            forward=forward,
            backward=PassTime(backward.seconds + in_backward_s, backward.compute + in_backward_s, backward.exchange),
            weight=PassTime(weight_s, weight_s, 0.0),
            together=PassTime(max(both_s, exchange_s + added_s), both_s, exchange_s),
        )
        return with_forward_again(found) if self._step.config.schedule.remat == "chunk" else found


class _Gathers(NamedTuple):
    """Seconds of gathers of parameters."""

    seconds: float
    waited_for: float  # while nothing computes


class _BlockTimes:
    """Bounds for blocks of a step, for one part of the batch."""

    def __init__(self, step: Step):
        self._step, self._stages, self._settings = step, step.compute(), step.config.schedule
        degrees = self._settings.microbatches, self._settings.backward_microbatches, self._settings.expert_chunks
        self._shape = make_shape(self._settings.policy, ("moe",), *degrees, weight_grad="greedy")
        self._exchange_s = 2 * step.exchanges.task_seconds(step.exchanged_bytes) if step.exchanged_bytes else 0.0
        builtin = self._settings.policy in POLICY_FACTS
        self._cuts_in_time = not builtin or (self._settings.cuts_batch and self._settings.microbatches > 1)
        self._waits = not self._cuts_in_time

    def work_s(self, kinds: tuple[str, ...], ends: Sequence[str]) -> float:
        """Seconds of all compute of a part of the batch in these blocks and ends of the model, or of all exchanges."""
        ends_s = sum(self.seconds(end, "FBW") for end in ends)
        return max(self.compute_s(kinds, "FBW") + ends_s, 2 * kinds.count("moe") * self._exchange_s)

    def step_s(self, kinds: tuple[str, ...]) -> float:
        """Seconds of the passes of all parts of the batch, embedding and head included."""
        forward, backward = self.pass_time(kinds, "F"), self.pass_time(kinds, "B", weights=True)
        gathers = self._gathers(kinds)
        compute_s = forward.compute + backward.compute + sum(self.seconds(end, "FBW") for end in _ENDS)
        if self._waits:
            # the head's weight gradient may be computed during exchanges
            in_order_s = forward.seconds + backward.seconds + sum(self.seconds(end, "FB") for end in _ENDS)
            compute_s = max(compute_s, in_order_s)
        sent_s, sums_s = forward.exchange + backward.exchange + gathers.seconds, sum(map(sum, self._step.sums_s))
        alone_s = max(compute_s + gathers.waited_for, sent_s)
        summed_s = alone_s + sums_s if self._settings.grad_reduce == "end" else max(alone_s, sent_s + sums_s)
        parts = self._step.config.train.grad_accumulation
        return parts * summed_s if self._step.sums_each_part else (parts - 1) * alone_s + summed_s

    def _gathers(self, kinds: tuple[str, ...]) -> _Gathers:
        """The gathers of parameters of a part of the batch."""
        if not self._step.gathers_s:
            return _Gathers(0.0, 0.0)
        embedding, *blocks, head = self._step.gathers_s
        ends_s = embedding["embed"] + head["head"]
        # the highest block keeps its parameters for the backward pass
        total_s = sum(sum(ops.values()) for ops in (*blocks, *blocks[:-1])) + ends_s
        if self._step.config.param_gather != "block":
            return _Gathers(total_s, 0.0)
        waited_s = ends_s + sum(ops["attend"] for ops in blocks)
        waited_s += sum(
            ops["attend" if kind == "dense" else "expert"] for kind, ops in zip(kinds, blocks[:-1], strict=False)
        )
        if not self._cuts_in_time:  # experts' parameters are gathered during attention, unless they take longer
            attend_s = self.seconds("attend", "F")
            waited_s += sum(
                max(ops["expert"] - attend_s, 0.0) for kind, ops in zip(kinds, blocks, strict=True) if kind == "moe"
            )
        return _Gathers(total_s, waited_s)

    def pass_time(self, kinds: tuple[str, ...], direction: Literal["F", "B"], weights: bool = False) -> PassTime:
        """A forward or a backward pass of these blocks, with or without weight gradients."""
        directions, settings = direction + "W" * weights, self._settings
        compute_s, layers = self.compute_s(kinds, directions), kinds.count("moe")
        least_s = max(compute_s, layers * self._exchange_s)
        if self._waits:
            # deferred weight gradients may be computed during exchanges
            in_order = direction if settings.weight_grad == "greedy" else directions
            experts_s, parts = self.seconds("expert", in_order), self._parts(direction)
            layer_s = max(experts_s + self._exchange_s / parts, self._exchange_s)
            least_s = max(least_s, self.compute_s(kinds, in_order) + layers * (layer_s - experts_s))
        return PassTime(least_s, compute_s, layers * self._exchange_s)

    @cached_method
    def compute_s(self, kinds: tuple[str, ...], directions: str) -> float:
        """Seconds of the compute tasks of these blocks in some of the directions F, B and W."""
        counts = Counter(kinds)
        return sum(counts[kind] * self.seconds(op, directions) for kind in counts for op in _OPS[kind])

    @cached_method
    def seconds(self, op: str, directions: str) -> float:
        """Seconds of the tasks of an op in some of the directions F, B and W."""
        shape, stage = self._shape, self._stages[op]
        task = "attend" if op == "dense" else op  # a dense block is one attend task
        return sum(shape.num_parts(each, task) * stage.seconds(Action(each, task, 0, 0), shape) for each in directions)

    def _parts(self, direction: Literal["F", "B"]) -> int:
        """The number of parts of a block's slots."""
        settings = self._settings
        own = (settings.backward_microbatches if direction == "B" else None) or settings.microbatches
        return (1 if settings.cuts_batch else own) * settings.expert_chunks
