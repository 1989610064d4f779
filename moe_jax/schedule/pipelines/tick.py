"""The order of a co-scheduled tick inside a stage: forward tasks of one microbatch and backward tasks of another.

The two sides are independent, so the exchanges of each run while the other computes. DualPipe (DeepSeek-V3, 2024, fig.
4) has a hand-made order for one block; this is list scheduling for any blocks, policy and times.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.shape import StepShape
from moe_jax.schedule.simulation import interleave, simulate_streams

SIDES = ("F", "B")  # forward tasks and the sum of the routers' counts; backward tasks and weight gradients
_Rank = Callable[[Action], float]


def coscheduled_tick(
    policy: str, shape: StepShape, seconds: Seconds, stream_of: StreamOf = three_streams
) -> list[tuple[str, Action]]:
    """The tasks of a stage's forward and backward pass in issue order, as (side, task), without reductions.

    Each side keeps its policy's order on every stream; weight gradients keep the order of their B tasks. The result is
    never slower than one side after the other. Raises ScheduleError.
    """
    issued = [action for action in make_schedule(policy, shape, seconds, stream_of).actions if not is_reduction(action)]
    sequential = [action for side in SIDES for action in issued if side_of(action) == side]
    needs = needs_inside(sequential, shape)
    rest_s = _rest(sequential, needs, seconds, stream_of)
    # Which of two ready tasks goes first matters a lot, and no rule is best for all task times: try several.
    first: tuple[_Rank, ...] = (
        lambda action: -rest_s[action],
        lambda action: seconds(action),
        lambda action: SIDES.index(side_of(action)),
        lambda action: -SIDES.index(side_of(action)),
    )
    orders = [*(_merge(sequential, needs, seconds, stream_of, rank) for rank in first), sequential]
    fastest = min(
        orders,
        key=lambda order: max(span.end_s for span in simulate_streams(order, needs, seconds, stream_of).values()),
    )
    return [(side_of(action), action) for action in fastest]


def side_of(action: Action) -> str:
    """The side of a tick that a task belongs to: F or B."""
    return "B" if action.direction in ("B", "W") else "F"


def needs_inside(actions: Iterable[Action], shape: StepShape) -> Needs:
    """The dependencies of tasks within a tick: tasks of their own side. All others ran in an earlier tick."""
    graph, inside = task_graph(shape), set(actions)
    return {
        action: frozenset(need for need in graph[action] & inside if side_of(need) == side_of(action))
        for action in inside
    }


def _lanes(actions: Iterable[Action], stream_of: StreamOf) -> list[deque[Action]]:
    """Group tasks into lanes of fixed order, one per side and stream. Weight gradients have their own, to fill gaps."""
    lanes: dict[object, deque[Action]] = defaultdict(deque)
    for action in actions:
        lanes[side_of(action), action.direction == "W", stream_of(action)].append(action)
    return list(lanes.values())


def _rest(sequential: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf) -> dict[Action, float]:
    """A lower bound of the seconds from each task's start to the end of its side: its longest path of followers."""
    followers: dict[Action, list[Action]] = defaultdict(list)
    for action in sequential:
        for need in needs[action]:
            followers[need].append(action)
    for lane in _lanes(sequential, stream_of):
        for before, after in pairwise(lane):
            followers[before].append(after)
    rest_s: dict[Action, float] = {}
    for action in reversed(sequential):
        rest_s[action] = seconds(action) + max((rest_s[follower] for follower in followers[action]), default=0.0)
    return rest_s


def _merge(
    sequential: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf, first: _Rank
) -> list[Action]:
    """List scheduling: the task that can start earliest is next, ties go by rank. Communication is issued early."""
    lanes = _lanes(sequential, stream_of)
    end_s: dict[Action, float] = {}
    free_s: dict[object, float] = defaultdict(float)

    def start_s(action: Action) -> float:
        return max([free_s[stream_of(action)], *(end_s[need] for need in needs[action])])

    while heads := [lane for lane in lanes if lane and needs[lane[0]] <= end_s.keys()]:
        lane = min(heads, key=lambda lane: (start_s(lane[0]), first(lane[0])))
        action = lane.popleft()
        end_s[action] = free_s[stream_of(action)] = start_s(action) + seconds(action)
    on_stream: dict[Stream, list[Action]] = defaultdict(list)
    for action in end_s:
        on_stream[stream_of(action)].append(action)
    compute = on_stream.pop(Stream.COMPUTE)
    return interleave(compute, list(on_stream.values()), needs)
