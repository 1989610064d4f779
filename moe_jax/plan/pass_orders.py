"""In which order a pipeline stage issues the tasks of its passes: what training runs, and what plans are timed by."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.costs import order_times
from moe_jax.plan.task_times import TaskStage
from moe_jax.schedule.actions import Action, two_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check as check_schedule
from moe_jax.schedule.pipelines.tick import coscheduled_tick, side_of
from moe_jax.schedule.shape import StepShape


class Orders(NamedTuple):
    """In which order tasks of a model chunk's passes are issued."""

    shape: StepShape
    forward: Sequence[Action]
    backward: Sequence[Action]
    weight: Sequence[Action]  # where weight gradients are a pass of their own
    together: Sequence[tuple[str, Action]]  # a forward and a backward pass, F and B, where ticks have both


def orders_of(
    kinds: Sequence[str],
    config: Config,
    mesh: Mapping[str, int],
    platform: str,
    split: bool,
    pairs: bool,
    measured: Mapping[str, TaskStage],
) -> Orders:
    """Of a chunk's blocks; sums of gradients over devices come behind the last tick. Raises ScheduleError.

    `split`: weight gradients are a pass of their own; `pairs`: ticks have a forward beside a backward pass.
    """
    settings, nothing = config.schedule, (0,) * (len(kinds) + 2)
    shape = make_shape(
        settings.policy,
        kinds,
        settings.microbatches,
        settings.backward_microbatches,
        settings.expert_chunks,
        weight_grad="greedy" if split else settings.weight_grad,
        reductions=nothing,
    )
    seconds = order_times(config, mesh, platform, [()] * len(nothing), measured).of(shape)
    schedule = make_schedule(settings.policy, shape, seconds, two_streams)
    check_schedule(schedule)
    actions = list(filter(_in_chunk, schedule.actions))
    together: list[tuple[str, Action]] = []
    if pairs:
        apart = {"W"} if split else set()

        def in_tick(action: Action) -> bool:
            return _in_chunk(action) and action.direction not in apart

        tick = coscheduled_tick(settings.policy, shape, lambda action: seconds(action) * in_tick(action), two_streams)
        together = [(side, action) for side, action in tick if in_tick(action)]
    return Orders(
        shape=shape,
        forward=[action for action in actions if side_of(action) == "F"],
        backward=[action for action in actions if action.direction == "B" or (action.direction == "W" and not split)],
        weight=[action for action in actions if action.direction == "W" and split],
        together=together,
    )


def _in_chunk(action: Action) -> bool:
    """Whether it is of a block: the ends of the model are passes of their own."""
    return action.op not in ("embed", "head")
