"""What collectives take of the devices that compute: their program hands operands over, and takes results back."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from moe_jax.plan.task_times import Linear
from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Handling:
    """Seconds of compute for one collective, by the bytes that a device holds for it."""

    start: Linear
    finish: Linear


FREE = Handling(start=Linear(0.0, 0.0), finish=Linear(0.0, 0.0))


def handled(
    schedule: Schedule,
    seconds: Seconds,
    stream_of: StreamOf,
    handling: Handling,
    bytes_of: Callable[[Action], float],
) -> Seconds:
    """The same seconds, more for compute behind which collectives start, and that is the first to need their results.

    What nothing needs is finished behind the last task.
    """
    if handling == FREE:
        return seconds
    extra = dict.fromkeys(schedule.actions, 0.0)
    needs, place = task_graph(schedule.shape), {action: i for i, action in enumerate(schedule.actions)}
    compute = [action for action in schedule.actions if stream_of(action) is Stream.COMPUTE]
    first: dict[Action, Action] = {}
    for task in compute:
        for need in needs[task]:
            first.setdefault(need, task)
    for action in extra.keys() - set(compute):
        if num_bytes := bytes_of(action):
            before = _last(needs[action] & set(compute), place)
            extra[compute[0] if before is None else before] += handling.start.seconds(num_bytes)
            extra[first.get(action, compute[-1])] += handling.finish.seconds(num_bytes)
    return lambda action: seconds(action) + extra[action]


def _last(actions: Collection[Action], place: dict[Action, int]) -> Action | None:
    return max(actions, key=place.__getitem__, default=None)
