"""Streams that run tasks: the walk behind the simulator, and the merge of streams into one order of issue."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.schedule.actions import Action, ScheduleError, Seconds, Stream, StreamOf
from moe_jax.schedule.dependencies import Needs


class Span(NamedTuple):
    """When a task runs."""

    start_s: float
    end_s: float


def in_list_order(action: Action) -> int:
    """One rank for all: every stream takes its tasks as listed."""
    return 0


def simulate_streams(
    actions: Iterable[Action],
    needs: Needs,
    seconds: Seconds,
    stream_of: StreamOf,
    rank_of: Callable[[Action], int] = in_list_order,
    slowdown: float = 1.0,
) -> dict[Action, Span]:
    """Run every task to its end, one at a time per stream; the result is sorted by start.

    Tasks of one stream and rank start in list order. A stream that is free takes the ready task of the lowest rank.
    While anything communicates, compute takes `slowdown` times as long.
    Raises ScheduleError if tasks wait for each other.
    """
    lanes: dict[tuple[int, Stream], deque[Action]] = defaultdict(deque)
    waiting: dict[Action, int] = {}
    followers: dict[Action, list[Action]] = defaultdict(list)
    for action in actions:
        lanes[rank_of(action), stream_of(action)].append(action)
        waiting[action] = len(needs[action])
        for need in needs[action]:
            followers[need].append(action)
    by_rank = sorted(lanes.items(), key=lambda lane: lane[0])
    now_s, running, start_s = 0.0, dict[Stream, _Running](), dict[Action, float]()
    spans: dict[Action, Span] = {}

    def startable() -> tuple[Stream, deque[Action]] | None:
        for (_, stream), lane in by_rank:
            if lane and stream not in running and not waiting[lane[0]]:
                return stream, lane
        return None

    while any(lanes.values()) or running:
        # a task that takes no time at all is done before a lower rank gets the stream
        while (found := startable()) is not None:
            stream, lane = found
            action = lane.popleft()
            start_s[action] = now_s
            running[stream] = _Running(action, now_s + seconds(action))
            _stretch(running, now_s, slowdown)
            if running[stream].end_s <= now_s:
                break
        if not running:
            stuck = next(lane[0] for lane in lanes.values() if lane)
            raise ScheduleError(
                f"{stuck} waits for {min(needs[stuck] - spans.keys())}, which never runs: check the order"
            )
        now_s = min(task.end_s for task in running.values())
        for stream in [stream for stream, task in running.items() if task.end_s == now_s]:
            action = running.pop(stream).action
            spans[action] = Span(start_s[action], now_s)
            for follower in followers[action]:
                waiting[follower] -= 1
        _stretch(running, now_s, slowdown)
    return {action: spans[action] for action in start_s}


@dataclass
class _Running:
    """A task on its stream, and when it ends at its present speed."""

    action: Action
    end_s: float
    slowed: bool = False


def _stretch(running: Mapping[Stream, _Running], now_s: float, slowdown: float) -> None:
    """Let compute go on at the speed of what runs beside it."""
    task = running.get(Stream.COMPUTE)
    beside = len(running) > 1
    if task is not None and slowdown != 1 and task.slowed != beside:
        factor = slowdown if beside else 1 / slowdown
        task.end_s, task.slowed = now_s + (task.end_s - now_s) * factor, beside


def interleave(compute: Iterable[Action], lanes: Sequence[Sequence[Action]], needs: Needs) -> list[Action]:
    """One order of issue: communication right behind the last task that it needs, earlier lanes first."""
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
