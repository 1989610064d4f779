"""Streams that run tasks: the walk behind the simulator, and the merge of streams into one order of issue."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
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


def play(
    actions: Iterable[Action],
    needs: Needs,
    seconds: Seconds,
    stream_of: StreamOf,
    rank_of: Callable[[Action], int] = in_list_order,
) -> dict[Action, Span]:
    """Run every task to its end, one at a time per stream; the result is sorted by start.

    Tasks of one stream and rank start in list order. A stream that is free takes the ready task of the lowest rank.
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
    ready_s = dict.fromkeys(waiting, 0.0)
    free_s = dict.fromkeys(Stream, 0.0)
    spans: dict[Action, Span] = {}
    while any(lanes.values()):
        # taken by start, then by rank: a task that takes no time at all is done before a lower rank gets the stream
        startable = [
            (max(ready_s[queue[0]], free_s[stream]), rank, stream)
            for (rank, stream), queue in lanes.items()
            if queue and not waiting[queue[0]]
        ]
        if not startable:
            stuck = next(queue[0] for queue in lanes.values() if queue)
            raise ScheduleError(
                f"{stuck} waits for {min(needs[stuck] - spans.keys())}, which never runs: check the order"
            )
        start_s, rank, stream = min(startable)
        action = lanes[rank, stream].popleft()
        end_s = free_s[stream] = start_s + seconds(action)
        spans[action] = Span(start_s, end_s)
        for follower in followers[action]:
            waiting[follower] -= 1
            ready_s[follower] = max(ready_s[follower], end_s)
    return spans


def interleave(compute: Iterable[Action], lanes: Sequence[Sequence[Action]], needs: Needs) -> list[Action]:
    """One order of issue: communication right behind the last task that it needs, earlier lanes first."""
    issued: dict[Action, None] = {}
    queues = [deque(lane) for lane in lanes]
    for action in compute:
        issued[action] = None
        while queue := next((q for q in queues if q and needs[q[0]] <= issued.keys()), None):
            issued[queue.popleft()] = None
    return list(issued)
