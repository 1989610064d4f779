"""The order of a co-scheduled tick inside a stage: forward tasks of one microbatch and backward tasks of another.

The two sides are independent, so the exchanges of each run while the other computes. DualPipe (DeepSeek-V3, 2024, fig.
4) has a hand-made order for one block; this is list scheduling for any blocks, policy and times.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.shape import StepShape
from moe_jax.schedule.simulation import NumberedTasks, interleave, makespan_s

SIDES = ("F", "B")  # forward tasks and the sum of the routers' counts; backward tasks and weight gradients
_Lanes = Sequence[Sequence[int]]


def coscheduled_tick(
    policy: str, shape: StepShape, seconds: Seconds, stream_of: StreamOf = three_streams
) -> list[tuple[str, Action]]:
    """The tasks of a stage's forward and backward pass in issue order, as (side, task), without reductions.

    Each side keeps its policy's order on every stream; weight gradients keep the order of their B tasks. The result is
    never slower than one side after the other. Raises ScheduleError.
    """
    issued = [action for action in make_schedule(policy, shape, seconds, stream_of).actions if not is_reduction(action)]
    sequential = tuple(action for side in SIDES for action in issued if side_of(action) == side)
    tasks, streams = numbered_inside(sequential, shape, stream_of)
    times_s = list(map(seconds, sequential))
    sides = [SIDES.index(side_of(action)) for action in sequential]
    lanes = _lanes(sequential, streams)
    # Which of two ready tasks goes first matters a lot, and no rule is best for all task times: try several.
    by_rest = [-rest_s for rest_s in _rest(tasks, lanes, times_s)]
    ranks: list[Sequence[float]] = [by_rest, times_s, sides, [-side for side in sides]]
    orders = [*(_merge(tasks, lanes, times_s, streams, rank) for rank in ranks), list(range(len(sequential)))]
    fastest = min(orders, key=lambda order: makespan_s(order, tasks, times_s, streams))
    return [(side_of(action), action) for action in tasks.actions(fastest)]


def side_of(action: Action) -> str:
    """The side of a tick that a task belongs to: F or B."""
    return "B" if action.direction in ("B", "W") else "F"


def needs_inside(actions: Iterable[Action], shape: StepShape) -> Needs:
    """The dependencies of tasks within a tick: tasks of their own side. All others ran in an earlier tick."""
    graph, inside = task_graph(shape), set(actions)
    return {
        action: frozenset(need for need in graph[action] & inside if side_of(need) == side_of(action))
        for action in actions
    }


@functools.lru_cache(maxsize=1024)
def numbered_inside(
    actions: tuple[Action, ...], shape: StepShape, stream_of: StreamOf
) -> tuple[NumberedTasks, tuple[Stream, ...]]:
    """Tasks numbered in this order, with their dependencies within a tick, and the stream of each."""
    return NumberedTasks.of(needs_inside(actions, shape)), tuple(map(stream_of, actions))


def _lanes(actions: Sequence[Action], streams: Sequence[Stream]) -> list[list[int]]:
    """Group tasks into lanes of fixed order, one per side and stream. Weight gradients have their own, to fill gaps."""
    lanes: dict[object, list[int]] = defaultdict(list)
    for task, action in enumerate(actions):
        lanes[side_of(action), action.direction == "W", streams[task]].append(task)
    return list(lanes.values())


def _rest(tasks: NumberedTasks, lanes: _Lanes, times_s: Sequence[float]) -> list[float]:
    """A lower bound of the seconds from each task's start to the end of its side: its longest path of followers."""
    followers = list(map(list, tasks.followers))
    for lane in lanes:
        for before, after in pairwise(lane):
            followers[before].append(after)
    rest_s = [0.0] * len(times_s)
    for task in reversed(range(len(times_s))):
        rest_s[task] = times_s[task] + max((rest_s[follower] for follower in followers[task]), default=0.0)
    return rest_s


def _merge(
    tasks: NumberedTasks, lanes: _Lanes, times_s: Sequence[float], streams: Sequence[Stream], first: Sequence[float]
) -> list[int]:
    """List scheduling: the task that can start earliest is next, ties go by rank. Communication is issued early."""
    queues = list(map(deque, lanes))
    waiting, followers, ready_s = list(tasks.waiting), tasks.followers, [0.0] * len(times_s)
    free_s, on_stream = dict.fromkeys(Stream, 0.0), defaultdict[Stream, list[int]](list)

    def rank(queue: deque[int]) -> tuple[float, float]:
        head = queue[0]
        return max(free_s[streams[head]], ready_s[head]), first[head]

    while heads := [queue for queue in queues if queue and not waiting[queue[0]]]:
        queue = min(heads, key=rank)
        start_s, _ = rank(queue)
        task = queue.popleft()
        on_stream[streams[task]].append(task)
        end_s = free_s[streams[task]] = start_s + times_s[task]
        for follower in followers[task]:
            waiting[follower] -= 1
            ready_s[follower] = max(ready_s[follower], end_s)
    compute = on_stream.pop(Stream.COMPUTE)
    return interleave(compute, list(on_stream.values()), tasks)
