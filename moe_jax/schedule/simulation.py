"""Simulate streams that run tasks, and merge the streams into one issue order."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.schedule.actions import Action, ScheduleError, Seconds, Stream, StreamOf
from moe_jax.schedule.dependencies import Needs


class Span(NamedTuple):
    """The start and end of a task."""

    start_s: float
    end_s: float


def in_list_order(action: Action) -> int:
    """The same priority for all tasks: every stream runs its tasks as listed."""
    return 0


def simulate_streams(
    actions: Iterable[Action],
    needs: Needs,
    seconds: Seconds,
    stream_of: StreamOf,
    rank_of: Callable[[Action], int] = in_list_order,
    slowdown: float = 1.0,
) -> dict[Action, Span]:
    """Simulate all tasks, one at a time per stream. Returns the span of each task, sorted by start.

    Tasks of one stream and rank start in list order. A stream that is free takes the ready task of the lowest rank.
    While any communication runs, compute takes `slowdown` times as long. Raises ScheduleError if tasks wait for each
    other.
    """
    lanes: dict[tuple[int, Stream], deque[Action]] = defaultdict(deque)
    waiting: dict[Action, int] = {}
    followers: dict[Action, list[Action]] = defaultdict(list)
    for action in actions:
        lanes[rank_of(action), stream_of(action)].append(action)
        waiting[action] = len(needs[action])
        for need in needs[action]:
            followers[need].append(action)
    by_rank = [(stream, lane) for (_, stream), lane in sorted(lanes.items(), key=lambda lane: lane[0])]
    now_s, running, start_s = 0.0, dict[Stream, _Running](), dict[Action, float]()
    spans: dict[Action, Span] = {}

    def start_next() -> bool:
        """Start a ready task of the lowest rank on a free stream. Returns whether another one may start."""
        for stream, lane in by_rank:
            if lane and stream not in running and not waiting[lane[0]]:
                action = lane.popleft()
                start_s[action] = now_s
                task = running[stream] = _Running(action, now_s + seconds(action))
                if slowdown != 1:
                    _stretch(running, now_s, slowdown)
                # a task of zero duration ends before a lower rank gets the stream
                return task.end_s > now_s
        return False

    while len(spans) < len(waiting):
        while start_next():
            pass
        if not running:
            stuck = next(lane[0] for lane in lanes.values() if lane)
            raise ScheduleError(
                f"{stuck} waits for {min(needs[stuck] - spans.keys())}, which never runs: check the order"
            )
        now_s = min([task.end_s for task in running.values()])
        for stream, task in list(running.items()):
            if task.end_s == now_s:
                del running[stream]
                spans[task.action] = Span(start_s[task.action], now_s)
                for follower in followers[task.action]:
                    waiting[follower] -= 1
        if slowdown != 1:
            _stretch(running, now_s, slowdown)
    return {action: spans[action] for action in start_s}


@dataclass(slots=True)
class _Running:
    """A running task, and when it ends at its present speed."""

    action: Action
    end_s: float
    slowed: bool = False


def _stretch(running: Mapping[Stream, _Running], now_s: float, slowdown: float) -> None:
    """Adjust the end of the running compute task when communication starts or stops next to it."""
    task = running.get(Stream.COMPUTE)
    overlaps = len(running) > 1
    if task is not None and task.slowed != overlaps:
        factor = slowdown if overlaps else 1 / slowdown
        task.end_s, task.slowed = now_s + (task.end_s - now_s) * factor, overlaps


def interleave(compute: Iterable[Action], lanes: Sequence[Sequence[Action]], needs: Needs) -> list[Action]:
    """Merge streams into one issue order.

    Communication is issued right after the last task that it needs; earlier lanes go first.
    """
    issued: dict[Action, None] = {}
    queues = [deque(lane) for lane in lanes]

    def communicate() -> None:
        while queue := next((q for q in queues if q and needs[q[0]] <= issued.keys()), None):
            issued[queue.popleft()] = None

    communicate()
    for action in compute:
        issued[action] = None
        communicate()
    return list(issued)
