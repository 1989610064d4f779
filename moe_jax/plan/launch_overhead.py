"""Launch overhead: compute time that starting and finishing collectives costs the devices.

A device hands operands to the program of a collective, and takes results back.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from moe_jax.plan.task_times import Linear
from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf, is_transfer
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class LaunchOverhead:
    """Seconds of compute for one collective, by the bytes that a device has for it."""

    start: Linear
    finish: Linear


NO_OVERHEAD = LaunchOverhead(start=Linear(0.0, 0.0), finish=Linear(0.0, 0.0))


def with_launch_overhead(
    schedule: Schedule,
    seconds: Seconds,
    stream_of: StreamOf,
    launch_overhead: LaunchOverhead,
    bytes_of: Callable[[Action], float],
) -> Seconds:
    """Add launch overhead to task durations.

    The start of a collective is added to the last compute task that it needs (if none, to the first task of compute),
    its finish to the first compute task that needs its results (if none, to the last task). What a gather or sum over
    tensor ranks passes on to an exchange, or gets from it, stays outside of compute.
    """
    if launch_overhead == NO_OVERHEAD:
        return seconds
    extra = dict.fromkeys(schedule.actions, 0.0)
    needs, place = task_graph(schedule.shape), {action: i for i, action in enumerate(schedule.actions)}
    compute = [action for action in schedule.actions if stream_of(action) is Stream.COMPUTE]
    first: dict[Action, Action] = {}
    for task in compute:
        for need in needs[task]:
            first.setdefault(need, task)
    of_rows = {action for action in schedule.actions if is_transfer(action)}
    passed_on = {need for action in of_rows for need in needs[action] & of_rows}
    for action in extra.keys() - set(compute):
        if num_bytes := bytes_of(action):
            if not needs[action] & passed_on:
                before = _last(needs[action] & set(compute), place)
                extra[compute[0] if before is None else before] += launch_overhead.start.seconds(num_bytes)
            if action not in passed_on:
                extra[first.get(action, compute[-1])] += launch_overhead.finish.seconds(num_bytes)
    return lambda action: seconds(action) + extra[action]


def _last(actions: Collection[Action], place: dict[Action, int]) -> Action | None:
    return max(actions, key=place.__getitem__, default=None)
