"""Simulate streams that run tasks, and merge the streams into one issue order.

Tasks have numbers, so that simulations and merges look facts up in lists instead of mappings.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from moe_jax.schedule.actions import Action, ScheduleError, Seconds, Stream, StreamOf
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.shape import StepShape


@dataclass(frozen=True, kw_only=True)
class NumberedTasks:
    """Tasks and their dependencies. Sequences have an entry for each task, by its number.

    Tasks that are needed but not there have numbers, too, after all others.
    """

    tasks: Sequence[Action]
    number: Mapping[Action, int]
    needs: Sequence[tuple[int, ...]]
    followers: Sequence[tuple[int, ...]]  # the tasks that need it
    waiting: Sequence[int]  # how many tasks it needs

    @staticmethod
    def of(needs: Needs) -> "NumberedTasks":
        """Number the tasks of a mapping from each task to those that it needs."""
        number: dict[Action, int] = {task: place for place, task in enumerate(needs)}
        alike: dict[frozenset[Action], list[int]] = {}  # all buckets of an owner need the same tasks
        for task, some in enumerate(needs.values()):
            alike.setdefault(some, []).append(task)
        of_set = {some: tuple([number.setdefault(need, len(number)) for need in some]) for some in alike}
        followers: list[list[int]] = [[] for _ in number]
        for some, tasks in alike.items():
            for need in of_set[some]:
                followers[need] += tasks
        return NumberedTasks(
            tasks=tuple(number),
            number=number,
            needs=[of_set[some] for some in needs.values()],
            followers=list(map(tuple, followers)),
            waiting=list(map(len, needs.values())),
        )

    def numbers(self, actions: Iterable[Action]) -> list[int]:
        """The numbers of these tasks."""
        return list(map(self.number.__getitem__, actions))

    def actions(self, numbers: Iterable[int]) -> list[Action]:
        """The tasks with these numbers."""
        return list(map(self.tasks.__getitem__, numbers))

    def with_needs(self, more: Mapping[int, int]) -> "NumberedTasks":
        """The same tasks, of which some need one more task."""
        if not more:
            return self
        needs, followers, waiting = list(self.needs), list(self.followers), list(self.waiting)
        for task, need in more.items():
            needs[task] += (need,)
            followers[need] += (task,)
            waiting[task] += 1
        return replace(self, needs=needs, followers=followers, waiting=waiting)


@lru_cache(maxsize=64)
def numbered_tasks(shape: StepShape) -> NumberedTasks:
    """All tasks of a shape."""
    return NumberedTasks.of(task_graph(shape))


_STREAMS = {stream: place for place, stream in enumerate(Stream)}
_PLACES = tuple(_STREAMS.values())
_COMPUTE = _STREAMS[Stream.COMPUTE]
_INTRA_NODE = _STREAMS[Stream.INTRA_NODE]
_COMMUNICATION = (_STREAMS[Stream.COMMUNICATION], _INTRA_NODE)


class Interference(NamedTuple):
    """How compute and communication that run at once delay each other: between nodes, and inside of a node.

    While a stream communicates, compute takes `slowdown` times as long; while both do, what each adds is added up. A
    collective that starts while the device computes takes `start_s` seconds longer, unless it starts when another one
    on its stream ends: it was waiting, and is sent at once.
    """

    slowdown: tuple[float, float] = (1.0, 1.0)
    start_s: tuple[float, float] = (0.0, 0.0)


NO_INTERFERENCE = Interference()


class BackgroundSum(NamedTuple):
    """How a sum between nodes uses links, if the host's threads run it (`parallel/background.py`)."""

    inside_s: float  # seconds inside of nodes, before and after
    halves: bool  # sent in two equal parts, between which more urgent collectives may go


class TimeSpan(NamedTuple):
    """The start and end of a task."""

    start_s: float
    end_s: float


class Spans(NamedTuple):
    """When tasks run, by their numbers."""

    start_s: dict[int, float]  # sorted
    end_s: dict[int, float]
    paused_s: dict[int, float]  # between the halves of sums


_NO_SUMS: Mapping[int, BackgroundSum] = {}


def in_list_order(action: Action) -> int:
    """The same priority for all tasks: every stream runs its tasks as listed."""
    return 0


def simulate_streams(
    actions: Iterable[Action],
    needs: Needs,
    seconds: Seconds,
    stream_of: StreamOf,
    rank_of: Callable[[Action], int] = in_list_order,
    interference: Interference = NO_INTERFERENCE,
) -> dict[Action, TimeSpan]:
    """Simulate all tasks, one at a time per stream. Returns the span of each task, sorted by start.

    Tasks of one stream and rank start in list order. A stream that is free takes the ready task of the lowest rank.
    Raises ScheduleError if tasks wait for each other.
    """
    inside = {action: needs[action] for action in actions}
    tasks = NumberedTasks.of(inside)
    times_s, streams, ranks = list(map(seconds, inside)), list(map(stream_of, inside)), list(map(rank_of, inside))
    spans = simulate_numbered(range(len(inside)), tasks, times_s, streams, ranks, interference)
    return {tasks.tasks[task]: TimeSpan(at_s, spans.end_s[task]) for task, at_s in spans.start_s.items()}


def simulate_numbered(
    order: Iterable[int],
    tasks: NumberedTasks,
    seconds: Sequence[float],
    streams: Sequence[Stream],
    ranks: Sequence[int],
    interference: Interference = NO_INTERFERENCE,
    sums: Mapping[int, BackgroundSum] = _NO_SUMS,
) -> Spans:
    """`simulate_streams` of tasks by number: `seconds`, `streams` and `ranks` have an entry for each task.

    `sums` are the tasks that are sums in the background.
    """
    lanes = _lanes(order, streams, ranks)
    by_rank = [(_STREAMS[stream], lanes[rank, stream]) for rank, stream in sorted(lanes)]
    waiting, followers = list(tasks.waiting), tasks.followers
    running, end_s = [-1] * len(_STREAMS), [math.inf] * len(_STREAMS)  # by stream: its task, and when that ends
    delays = None if interference == NO_INTERFERENCE else _Delays(interference, running, end_s, seconds, sums)
    start_s: dict[int, float] = {}
    ended_s: dict[int, float] = {}
    paused_s: dict[int, float] = {}  # since when, and later for how long
    now_s = 0.0
    while True:
        for stream, lane in by_rank:
            if running[stream] < 0 and lane and not waiting[lane[0]]:
                task = running[stream] = lane.popleft()
                if task in paused_s:
                    paused_s[task] = now_s - paused_s[task]
                else:
                    start_s[task] = now_s
                end_s[stream] = now_s + seconds[task] / (2 if task in sums and sums[task].halves else 1)
                if delays:
                    delays.start(stream, task, now_s)
                if end_s[stream] <= now_s:
                    break  # it ends before a lower rank gets the stream
        if delays:
            delays.delay_starts(now_s)
        now_s = min(end_s)
        if now_s == math.inf:
            break
        for stream in _PLACES:
            if end_s[stream] == now_s:
                task = running[stream]
                running[stream], end_s[stream] = -1, math.inf
                if delays:
                    delays.stop(stream, now_s)
                if task in sums and sums[task].halves and task not in paused_s:
                    paused_s[task] = now_s
                    lanes[ranks[task], streams[task]].appendleft(task)
                    continue
                ended_s[task] = now_s
                for follower in followers[task]:
                    waiting[follower] -= 1
        if delays:
            delays.stretch(now_s)
    _check_all_ended(lanes, tasks, ended_s)
    return Spans(start_s, ended_s, paused_s)


_Lanes = Mapping[tuple[int, Stream], deque[int]]  # the tasks of a rank and stream that have not started, in their order


def _lanes(order: Iterable[int], streams: Sequence[Stream], ranks: Sequence[int]) -> _Lanes:
    lanes: dict[tuple[int, Stream], deque[int]] = defaultdict(deque)
    for task in order:
        lanes[ranks[task], streams[task]].append(task)
    return lanes


def _check_all_ended(lanes: _Lanes, tasks: NumberedTasks, ended: Collection[int]) -> None:
    """Raise ScheduleError if a task has not started, because it waits for one that never ends."""
    if stuck := [lane[0] for lane in lanes.values() if lane]:
        waits = stuck[0]
        missing = min(tasks.tasks[need] for need in tasks.needs[waits] if need not in ended)
        raise ScheduleError(f"{tasks.tasks[waits]} waits for {missing}, which never runs: check the order")


class _Delays:
    """Interference in one simulation: it moves the ends of the tasks that run, `end_s` by stream."""

    def __init__(
        self,
        interference: Interference,
        running: Sequence[int],
        end_s: list[float],
        seconds: Sequence[float],
        sums: Mapping[int, BackgroundSum],
    ):
        self._running, self._end_s, self._seconds, self._sums = running, end_s, seconds, sums
        self._slowdown, self._later_s = (dict(zip(_COMMUNICATION, values, strict=True)) for values in interference)
        self._slowed = 1.0  # how many times as long the running compute task takes
        self._slows = dict.fromkeys(_COMMUNICATION, 0.0)  # what each stream adds to that now
        self._free_s = dict.fromkeys(_COMMUNICATION, -1.0)  # when its last task ended
        self._started: list[int] = []  # streams that started to communicate at this moment, and did not just before

    def start(self, stream: int, task: int, now_s: float) -> None:
        """Apply what a task that starts on a stream changes."""
        if stream == _COMPUTE:
            self._slowed = 1.0
        else:
            self._slows[stream] = self._slowdown[stream] - 1
            if task in self._sums and self._seconds[task]:
                self._slows[stream] += (
                    (self._slowdown[_INTRA_NODE] - 1) * self._sums[task].inside_s / self._seconds[task]
                )
            if self._free_s[stream] < now_s:
                self._started.append(stream)
        self.stretch(now_s)

    def delay_starts(self, now_s: float) -> None:
        """Move the ends of collectives that start next to compute, once all tasks that start now have started."""
        if self._started and min(self._end_s) > now_s:
            if self._running[_COMPUTE] >= 0:
                for stream in self._started:
                    self._end_s[stream] += self._later_s[stream]
            self._started.clear()

    def stop(self, stream: int, now_s: float) -> None:
        """Apply what the end of a task, or of the first half of a sum, changes."""
        if stream != _COMPUTE:
            self._slows[stream], self._free_s[stream] = 0.0, now_s

    def stretch(self, now_s: float) -> None:
        """Move the end of the running compute task if communication started or stopped next to it."""
        if self._running[_COMPUTE] < 0:
            return
        factor = 1 + sum(self._slows.values())
        if self._slowed != factor:
            self._end_s[_COMPUTE] = now_s + (self._end_s[_COMPUTE] - now_s) * factor / self._slowed
            self._slowed = factor


def makespan_s(
    order: Iterable[int], tasks: NumberedTasks, seconds: Sequence[float], streams: Sequence[Stream]
) -> float:
    """When the last of all tasks ends if each stream runs its tasks in this order; inf if a task is missing, or stands
    before one that it needs.
    """
    free_s, needs = dict.fromkeys(Stream, 0.0), tasks.needs
    end_s = [math.inf] * len(tasks.tasks)
    for task in order:
        start_s = free_s[streams[task]]
        for need in needs[task]:
            if end_s[need] > start_s:
                start_s = end_s[need]
        end_s[task] = free_s[streams[task]] = start_s + seconds[task]
    return max(end_s)


def interleave(compute: Iterable[int], lanes: Sequence[Iterable[int]], tasks: NumberedTasks) -> list[int]:
    """Merge streams into one issue order, of tasks by number.

    Communication is issued right after the last task that it needs; earlier lanes go first.
    """
    issued: list[int] = []
    queues = [queue for queue in map(deque, lanes) if queue]
    waiting, followers = list(tasks.waiting), tasks.followers

    def communicate() -> None:
        """Issue all communication that is ready, the earliest lane first, one task at a time."""
        place = 0
        while place < len(queues):
            queue = queues[place]
            if queue and not waiting[queue[0]]:
                task = queue.popleft()
                issued.append(task)
                if followers[task]:
                    for follower in followers[task]:
                        waiting[follower] -= 1
                    place = 0  # it may have been awaited in an earlier lane
            else:
                place += 1

    communicate()
    for task in compute:
        issued.append(task)
        for follower in followers[task]:
            waiting[follower] -= 1
        communicate()
    return issued
