"""The order of one co-scheduled tick inside a stage: forward tasks of one microbatch beside backward tasks of another.

The two sides need nothing of each other, so each one's exchanges run while the other computes. DualPipe (DeepSeek-V3,
2024, fig. 4) has such an order by hand for one block; this is list scheduling for any blocks, policy and times.
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
    """(side, task) of a stage's forward and backward pass, reductions left out, in the order in which they are issued.

    Each side keeps its policy's order on every stream; weight gradients keep that of their B. Never slower than one
    side after the other. Raises ScheduleError.
    """
    issued = [action for action in make_schedule(policy, shape, seconds, stream_of).actions if not is_reduction(action)]
    apart = [action for side in SIDES for action in issued if side_of(action) == side]
    needs = needs_inside(apart, shape)
    rest_s = _rest(apart, needs, seconds, stream_of)
    # Who goes first where two could start at once decides more than it seems, and no rule is best for all times.
    first: tuple[_Rank, ...] = (
        lambda action: -rest_s[action],
        lambda action: seconds(action),
        lambda action: SIDES.index(side_of(action)),
        lambda action: -SIDES.index(side_of(action)),
    )
    orders = [*(_merge(apart, needs, seconds, stream_of, rank) for rank in first), apart]
    fastest = min(
        orders,
        key=lambda order: max(span.end_s for span in simulate_streams(order, needs, seconds, stream_of).values()),
    )
    return [(side_of(action), action) for action in fastest]


def side_of(action: Action) -> str:
    """The side that a task is on."""
    return "B" if action.direction in ("B", "W") else "F"


def needs_inside(actions: Iterable[Action], shape: StepShape) -> Needs:
    """What tasks of a tick need of it: those of their own side. All else was done in an earlier tick."""
    graph, inside = task_graph(shape), set(actions)
    return {
        action: frozenset(need for need in graph[action] & inside if side_of(need) == side_of(action))
        for action in inside
    }


def _lanes(actions: Iterable[Action], stream_of: StreamOf) -> list[deque[Action]]:
    """Runs of tasks whose order is fixed: a side on a stream; weight gradients apart, to fill what others leave."""
    lanes: dict[object, deque[Action]] = defaultdict(deque)
    for action in actions:
        lanes[side_of(action), action.direction == "W", stream_of(action)].append(action)
    return list(lanes.values())


def _rest(apart: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf) -> dict[Action, float]:
    """Seconds from each task's start to its side's end at least: the longest path of what follows it."""
    followers: dict[Action, list[Action]] = defaultdict(list)
    for action in apart:
        for need in needs[action]:
            followers[need].append(action)
    for lane in _lanes(apart, stream_of):
        for before, behind in pairwise(lane):
            followers[before].append(behind)
    rest_s: dict[Action, float] = {}
    for action in reversed(apart):
        rest_s[action] = seconds(action) + max((rest_s[follower] for follower in followers[action]), default=0.0)
    return rest_s


def _merge(apart: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf, first: _Rank) -> list[Action]:
    """Always the task that can start earliest, of several the one of the lowest rank; communication issued early."""
    lanes = _lanes(apart, stream_of)
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
