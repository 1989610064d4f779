"""The predicted timeline of a schedule: times, exposed communication, live memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf, three_streams
from moe_jax.schedule.build import ranks_of, streams_of
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.param_gathers import releases
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.simulation import (
    NO_INTERFERENCE,
    BackgroundSum,
    Interference,
    Spans,
    in_list_order,
    numbered_tasks,
    simulate_numbered,
)

_NO_SUMS: Mapping[Action, BackgroundSum] = {}


class SimulatedTask(NamedTuple):
    """One action on its stream, with its start and end."""

    action: Action
    stream: Stream
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All tasks of a step. Facts of tasks are found by their numbers."""

    schedule: Schedule
    actions: Sequence[Action]
    streams: Sequence[Stream]
    spans: Spans
    sums: Mapping[int, BackgroundSum] = field(default_factory=dict)

    @cached_property
    def tasks(self) -> tuple[SimulatedTask, ...]:
        """The tasks, sorted by start."""
        return tuple(
            SimulatedTask(self.actions[task], self.streams[task], start_s, self.spans.end_s[task])
            for task, start_s in self.spans.start_s.items()
        )

    @cached_property
    def makespan_s(self) -> float:
        """Duration of the step. What a sum passes on inside of a node is over after the sum's own stream is free."""
        last_s = max(self.spans.end_s.values())
        return max([last_s, *(self.spans.end_s[task] + own.inside_s for task, own in self.sums.items())])

    @cached_property
    def busy_s(self) -> dict[Stream, float]:
        """Busy time of each stream: its duration if it ran alone."""
        busy_s = dict.fromkeys(Stream, 0.0)
        for task in self.spans.start_s:
            busy_s[self.streams[task]] += self._busy_s(task)
        return busy_s

    def busy_with_s(self, counts: Callable[[Action], bool]) -> float:
        """Busy time with the tasks that count."""
        return sum(self._busy_s(task) for task in self.spans.start_s if counts(self.actions[task]))

    def _busy_s(self, task: int) -> float:
        start_s, end_s, paused_s = self.spans
        return end_s[task] - start_s[task] - paused_s.get(task, 0.0)

    @property
    def exposed_s(self) -> float:
        """Time in which something communicates and nothing computes. Some stream is always busy."""
        return self.makespan_s - self.busy_s[Stream.COMPUTE]

    def peak_bytes(self, output_bytes: Callable[[Action], float]) -> float:
        """The most bytes alive at once.

        An output is alive from its task's start to the end of the last task that needs it. The output of a forward task
        includes the activations for its backward task. Outputs that no task needs stay alive to the end.
        """
        last_use_s: dict[Action, float] = {}
        needs = task_graph(self.schedule.shape)
        for task in self.tasks:
            for need in needs[task.action]:
                last_use_s[need] = max(last_use_s.get(need, 0.0), task.end_s)
        changes = chain.from_iterable(
            (
                (task.start_s, output_bytes(task.action)),
                (last_use_s.get(task.action, self.makespan_s), -output_bytes(task.action)),
            )
            for task in self.tasks
        )
        live = peak = 0.0
        for _, change in sorted(changes):  # at the same instant bytes are freed first
            live += change
            peak = max(peak, live)
        return peak


def simulate(
    schedule: Schedule,
    seconds: Seconds,
    stream_of: StreamOf = three_streams,
    rank_of: Callable[[Action], int] = in_list_order,
    interference: Interference = NO_INTERFERENCE,
    sums: Mapping[Action, BackgroundSum] = _NO_SUMS,
) -> Timeline:
    """Simulate a schedule: one task at a time per stream, streams concurrently.

    `seconds` maps an action to its duration (`times.__getitem__` for a mapping). Streams run their tasks as listed;
    with `rank_of=exchanges_first` a free stream runs a reduction only if no exchange is ready. `sums` are those
    that the host's threads run.
    Raises ScheduleError if tasks wait for each other.
    """
    tasks, streams = numbered_tasks(schedule.shape), streams_of(schedule.shape, stream_of)
    order = tasks.numbers(schedule.actions)
    compute = (tasks.tasks[task] for task in order if streams[task] == Stream.COMPUTE)
    place = {task: number for number, task in enumerate(order)}
    releasing = {tasks.number[gather]: tasks.number[task] for gather, task in releases(schedule.shape, compute).items()}
    # loops gather some earlier, which the list then says
    waits = {gather: task for gather, task in releasing.items() if place[task] < place[gather]}
    times_s, ranks = list(map(seconds, tasks.tasks)), ranks_of(schedule.shape, rank_of)
    in_background = {tasks.number[action]: own for action, own in sums.items()}
    spans = simulate_numbered(order, tasks.with_needs(waits), times_s, streams, ranks, interference, in_background)
    return Timeline(schedule=schedule, actions=tasks.tasks, streams=streams, spans=spans, sums=in_background)
