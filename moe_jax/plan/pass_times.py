"""Durations of the passes of a model chunk for one part of the batch, from simulations of its blocks.

The blocks run in training's issue order.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_jax.config.layer_layout import GroupBlock, segments
from moe_jax.plan.caching import cached_method
from moe_jax.plan.gradients import params_by_group
from moe_jax.plan.pass_orders import Orders, orders_of
from moe_jax.plan.recurrent import recurrent_share
from moe_jax.plan.resources import owned_by_kind
from moe_jax.plan.simulate import Timeline
from moe_jax.plan.step_times import Step
from moe_jax.schedule.actions import NO_BLOCK, Action, Stream
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.pipelines.tick import needs_inside, numbered_inside
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape
from moe_jax.schedule.simulation import NumberedTasks, simulate_numbered

_PERIODS = 3  # simulated periods of equal blocks; each further one takes as long as the last one added


class PassTime(NamedTuple):
    """Seconds of a pass, and of its compute and exchanges."""

    seconds: float
    compute: float
    exchange: float


class ChunkTimes(NamedTuple):
    """The durations of a model chunk's passes."""

    forward: PassTime
    backward: PassTime  # without weight gradients if they are split
    weight: PassTime
    together: PassTime  # forward and backward, concurrently


class Ends(NamedTuple):
    """Durations at the two ends of the model; those of the embedding are compute."""

    embedding: float
    head: PassTime  # forward and backward, with the block of multi-token prediction
    embedding_back: float


class PassTimes:
    """Durations of the passes of a step's model chunks."""

    def __init__(self, step: Step, split: bool, pairs: bool):
        self._step, self._split, self._pairs = step, split, pairs
        self._segments = segments(step.config.model)

    def chunk(self, group: Sequence[GroupBlock]) -> ChunkTimes:
        """The durations of a chunk with these blocks."""
        return self._chunk(_repeats(group))

    @property
    def shape_of_period(self) -> StepShape:
        """The shape of the lowest period of blocks."""
        return self._orders(self._segments[0].kinds).shape

    @functools.cached_property
    def ends(self) -> Ends:
        """The durations of embedding and head, the same for all chunks that have them."""
        shape = self.shape_of_period
        seconds = self._step.times.of(shape)

        def of(direction: str, op: str) -> float:
            return shape.num_parts(direction, op) * seconds(Action(direction, op, NO_BLOCK, 0))

        head = of("F", "head") + of("B", "head") + (of("W", "head") if shape.split_weight_grad else 0.0)
        model = self._step.config.model
        added_s = self._step.adding_s(model.hidden_size * model.vocab_size)
        passes = [PassTime(head + added_s, head + added_s, 0.0)]
        if model.has_mtp:
            kinds = self._segments[-1].kinds
            passes += [*self._passes(kinds)[:3], PassTime(self._added_s(kinds), self._added_s(kinds), 0.0)]
        return Ends(of("F", "embed"), sum_of(*passes), of("B", "embed") + added_s)

    def timeline(self, group: Sequence[GroupBlock]) -> Timeline:
        """The timeline of one part of the batch on a stage.

        Its two passes run concurrently if ticks have both, else one after the other.
        """
        repeats = _repeats(group)
        orders = self._orders(self._kinds(tuple((number, min(count, _PERIODS)) for number, count in repeats)))
        actions = [*(action for _, action in orders.together), *orders.weight]
        needs = needs_inside(actions, orders.shape)
        if not self._pairs:
            actions = [*orders.forward, *orders.backward, *orders.weight]
            graph, inside = task_graph(orders.shape), set(actions)
            needs = {action: frozenset(graph[action] & inside) for action in actions}
        schedule = Schedule(self._step.config.schedule.policy, orders.shape, tuple(actions))
        tasks, streams = NumberedTasks.of(needs), tuple(map(self._step.stream_of, actions))
        times_s, ranks = list(map(self._step.task_seconds(schedule), actions)), [0] * len(actions)
        spans = simulate_numbered(range(len(actions)), tasks, times_s, streams, ranks, self._step.interference)
        return Timeline(schedule=schedule, actions=actions, streams=streams, spans=spans)

    @cached_method
    def _chunk(self, repeats: tuple[tuple[int, int], ...]) -> ChunkTimes:
        """The durations of a chunk with these numbers of periods of each segment."""
        longest, count = max(repeats, key=lambda run: run[1])

        def of(periods: int) -> ChunkTimes:
            return self._simulated(self._kinds(tuple((n, periods if n == longest else c) for n, c in repeats)))

        if count <= _PERIODS:
            return of(count)
        fewer, few = of(_PERIODS - 1), of(_PERIODS)
        return ChunkTimes(*(_extended(*passes, count - _PERIODS) for passes in zip(fewer, few, strict=True)))

    def _kinds(self, repeats: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        return tuple(kind for number, count in repeats for kind in self._segments[number].kinds * count)

    @cached_method
    def _orders(self, kinds: tuple[str, ...]) -> Orders:
        config, step = self._step.config, self._step
        return orders_of(
            kinds, config, step.mesh, step.device.platform, self._split, self._pairs, step.measured.compute
        )

    def _passes(self, kinds: tuple[str, ...]) -> ChunkTimes:
        """The durations of the passes of a chunk with these blocks that neither recompute nor add gradients."""
        orders = self._orders(kinds)
        shape, interference = orders.shape, self._step.interference
        seconds = self._step.task_seconds(
            Schedule(self._step.config.schedule.policy, shape, (*orders.forward, *orders.backward, *orders.weight))
        )

        def simulated(actions: Iterable[Action]) -> PassTime:
            actions = tuple(actions)
            tasks, streams = numbered_inside(actions, shape, self._step.stream_of)
            times_s, order = list(map(seconds, actions)), range(len(actions))
            start_s, end_s, _ = simulate_numbered(order, tasks, times_s, streams, [0] * len(actions), interference)
            busy = dict.fromkeys(Stream, 0.0)
            for task, at_s in start_s.items():
                busy[streams[task]] += end_s[task] - at_s
            return PassTime(
                max(end_s.values(), default=0.0),
                busy[Stream.COMPUTE],
                busy[Stream.COMMUNICATION] + busy[Stream.INTRA_NODE],
            )

        return ChunkTimes(
            *map(simulated, (orders.forward, orders.backward, orders.weight, [task for _, task in orders.together]))
        )

    @cached_method
    def _simulated(self, kinds: tuple[str, ...]) -> ChunkTimes:
        found = self._passes(kinds)
        if self._step.config.schedule.remat == "chunk":
            found = with_forward_again(found)
        added_s = self._added_s(kinds)
        longer = {
            name: _longer(getattr(found, name), added_s)
            for name in ("weight" if self._split else "backward", "together")
        }
        return found._replace(**longer)

    def _added_s(self, kinds: Iterable[str]) -> float:
        """Seconds to add the gradients of these blocks to those of earlier parts."""
        step, model = self._step, self._step.config.model
        of_kind = owned_by_kind(model, is_recurrent=recurrent_share(model) > 0.5)  # the kind of most blocks
        parameters = (sum(params_by_group(of_kind[kind], step.config, step.mesh).values()) for kind in kinds)
        return step.adding_s(sum(parameters))


def _repeats(group: Sequence[GroupBlock]) -> tuple[tuple[int, int], ...]:
    """The (segment, periods) pairs of a group, from the bottom up."""
    found: dict[int, int] = {}
    for block in group:
        found[block.segment] = found.get(block.segment, 0) + (block.place == 0)
    return tuple(found.items())


def sum_of(*passes: PassTime) -> PassTime:
    """Return the duration of passes that run one after the other."""
    return PassTime(*map(sum, zip(*passes, strict=True)))


def with_forward_again(found: ChunkTimes) -> ChunkTimes:
    """The durations with `schedule.remat=chunk`: a backward pass runs the forward pass again."""
    return found._replace(
        backward=sum_of(found.forward, found.backward), together=sum_of(found.forward, found.together)
    )


def _longer(found: PassTime, seconds: float) -> PassTime:
    return found._replace(seconds=found.seconds + seconds, compute=found.compute + seconds)


def _extended(fewer: PassTime, few: PassTime, more: int) -> PassTime:
    return PassTime(*(last + more * (last - before) for before, last in zip(fewer, few, strict=True)))
