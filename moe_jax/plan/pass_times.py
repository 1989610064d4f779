"""How long the passes of a model chunk take for one part of the batch: its blocks, simulated in training's order."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_jax.config.layer_layout import GroupBlock, segments
from moe_jax.plan.gradients import held_by
from moe_jax.plan.pass_orders import Orders, orders_of
from moe_jax.plan.resources import owned_by_kind
from moe_jax.plan.simulate import SimulatedTask, Timeline
from moe_jax.plan.step_times import Step
from moe_jax.schedule.actions import NO_BLOCK, Action, Stream, two_streams
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.pipelines.tick import needs_inside
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.simulation import simulate_streams

_PERIODS = 3  # of equal blocks that are simulated; each further one takes what the last one added


class PassTime(NamedTuple):
    """Seconds of a pass, and of what it is made of."""

    seconds: float
    compute: float
    exchange: float


class ChunkTimes(NamedTuple):
    """The passes of a model chunk."""

    forward: PassTime
    backward: PassTime  # without weight gradients where they are apart
    weight: PassTime
    together: PassTime  # forward and backward, beside each other


class Ends(NamedTuple):
    """Seconds of compute at the model's ends."""

    embedding: float
    head: float  # forward and backward
    embedding_back: float


class PassTimes:
    """Of a step's model chunks."""

    def __init__(self, step: Step, split: bool, pairs: bool):
        self._step, self._split, self._pairs = step, split, pairs
        self._segments = segments(step.config.model)
        self._chunk = functools.cache(self._chunk_of)
        self._simulated = functools.cache(self._simulate)
        self._orders = functools.cache(self._orders_of)

    def chunk(self, group: Sequence[GroupBlock]) -> ChunkTimes:
        """Of these blocks."""
        return self._chunk(_repeats(group))

    @functools.cached_property
    def ends(self) -> Ends:
        """The same for all chunks that have them."""
        shape = self._orders(self._segments[0].kinds).shape
        seconds = self._step.times().of(shape)

        def of(direction: str, op: str) -> float:
            return shape.num_parts(direction, op) * seconds(Action(direction, op, NO_BLOCK, 0))

        head = of("F", "head") + of("B", "head") + (of("W", "head") if shape.split_weight_grad else 0.0)
        model = self._step.config.model
        added_s = self._step.adding_s(model.hidden_size * model.vocab_size)
        return Ends(of("F", "embed"), head + added_s, of("B", "embed") + added_s)

    def timeline(self, group: Sequence[GroupBlock]) -> Timeline:
        """What a stage does with a part: two passes beside each other, where ticks have both, else one by one."""
        repeats = _repeats(group)
        orders = self._orders(self._kinds(tuple((number, min(count, _PERIODS)) for number, count in repeats)))
        actions = [*(action for _, action in orders.together), *orders.weight]
        needs = needs_inside(actions, orders.shape)
        if not self._pairs:
            actions = [*orders.forward, *orders.backward, *orders.weight]
            graph, inside = task_graph(orders.shape), set(actions)
            needs = {action: frozenset(graph[action] & inside) for action in actions}
        schedule = Schedule(self._step.config.schedule.policy, orders.shape, tuple(actions))
        spans = simulate_streams(
            actions, needs, self._step.handled(schedule), two_streams, slowdown=self._step.slowdown
        )
        return Timeline(
            schedule, tuple(SimulatedTask(action, two_streams(action), *span) for action, span in spans.items())
        )

    def _chunk_of(self, repeats: tuple[tuple[int, int], ...]) -> ChunkTimes:
        """Of so many periods of each segment."""
        longest, count = max(repeats, key=lambda run: run[1])

        def of(periods: int) -> ChunkTimes:
            return self._simulated(self._kinds(tuple((n, periods if n == longest else c) for n, c in repeats)))

        if count <= _PERIODS:
            return of(count)
        fewer, few = of(_PERIODS - 1), of(_PERIODS)
        return ChunkTimes(*(_extended(*passes, count - _PERIODS) for passes in zip(fewer, few, strict=True)))

    def _kinds(self, repeats: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        return tuple(kind for number, count in repeats for kind in self._segments[number].kinds * count)

    def _orders_of(self, kinds: tuple[str, ...]) -> Orders:
        config, step = self._step.config, self._step
        return orders_of(
            kinds, config, step.mesh, step.device.platform, self._split, self._pairs, step.measured.compute
        )

    def _simulate(self, kinds: tuple[str, ...]) -> ChunkTimes:
        orders = self._orders(kinds)
        shape, together = orders.shape, [action for _, action in orders.together]
        seconds = self._step.handled(
            Schedule(self._step.config.schedule.policy, shape, (*orders.forward, *orders.backward, *orders.weight))
        )

        def played(actions: Sequence[Action]) -> PassTime:
            needs: Needs = needs_inside(actions, shape)
            spans = simulate_streams(actions, needs, seconds, two_streams, slowdown=self._step.slowdown)
            busy = dict.fromkeys(Stream, 0.0)
            for action, span in spans.items():
                busy[two_streams(action)] += span.end_s - span.start_s
            end_s = max((span.end_s for span in spans.values()), default=0.0)
            return PassTime(end_s, busy[Stream.COMPUTE], busy[Stream.COMMUNICATION])

        found = ChunkTimes(played(orders.forward), played(orders.backward), played(orders.weight), played(together))
        added_s = self._added_s(kinds)
        behind = {
            name: _longer(getattr(found, name), added_s)
            for name in ("weight" if self._split else "backward", "together")
        }
        return found._replace(**behind)

    def _added_s(self, kinds: Iterable[str]) -> float:
        """To add gradients of such blocks to those of the parts before."""
        step, of_kind = self._step, owned_by_kind(self._step.config.model)
        parameters = (held_by(of_kind[kind], step.config, step.mesh).total() for kind in kinds)
        return step.adding_s(sum(parameters))


def _repeats(group: Sequence[GroupBlock]) -> tuple[tuple[int, int], ...]:
    """(segment, periods) from the bottom up."""
    found: dict[int, int] = {}
    for held in group:
        found[held.segment] = found.get(held.segment, 0) + (held.place == 0)
    return tuple(found.items())


def _longer(found: PassTime, seconds: float) -> PassTime:
    return found._replace(seconds=found.seconds + seconds, compute=found.compute + seconds)


def _extended(fewer: PassTime, few: PassTime, more: int) -> PassTime:
    return PassTime(*(last + more * (last - before) for before, last in zip(fewer, few, strict=True)))
