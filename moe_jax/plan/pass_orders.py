"""The issue order of a pipeline stage's tasks, which training runs and plans simulate."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.costs import order_times
from moe_jax.plan.task_times import TaskStage
from moe_jax.schedule.actions import Action
from moe_jax.schedule.build import has_tensor_tasks, make_schedule, make_shape, step_streams
from moe_jax.schedule.dependencies import check as check_schedule
from moe_jax.schedule.pipelines.tick import coscheduled_tick, side_of
from moe_jax.schedule.shape import StepShape


class Orders(NamedTuple):
    """The issue order of the tasks of a model chunk's passes."""

    shape: StepShape
    forward: Sequence[Action]
    backward: Sequence[Action]
    weight: Sequence[Action]  # if weight gradients are a pass of their own
    together: Sequence[tuple[str, Action]]  # a forward and a backward pass, F and B, if ticks have both


def orders_of(
    kinds: Sequence[str],
    config: Config,
    mesh: Mapping[str, int],
    platform: str,
    split: bool,
    pairs: bool,
    measured: Mapping[str, TaskStage],
) -> Orders:
    """The orders of a chunk's blocks. Gradients are summed over devices after the last tick. Raises ScheduleError.

    `split`: weight gradients are a pass of their own; `pairs`: ticks have both a forward and a backward pass.
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
        sharded_experts=has_tensor_tasks(config, mesh),
    )
    seconds = order_times(config, mesh, platform, [()] * len(nothing), measured).of(shape)
    stream_of = step_streams(config, mesh, platform)
    schedule = make_schedule(settings.policy, shape, seconds, stream_of)
    check_schedule(schedule)
    actions = list(filter(_in_chunk, schedule.actions))
    together: list[tuple[str, Action]] = []
    if pairs:
        other_passes = {"W"} if split else set()

        def in_tick(action: Action) -> bool:
            return _in_chunk(action) and action.direction not in other_passes

        tick = coscheduled_tick(settings.policy, shape, lambda action: seconds(action) * in_tick(action), stream_of)
        together = [(side, action) for side, action in tick if in_tick(action)]
    return Orders(
        shape=shape,
        forward=[action for action in actions if side_of(action) == "F"],
        backward=[action for action in actions if action.direction == "B" or (action.direction == "W" and not split)],
        weight=[action for action in actions if action.direction == "W" and split],
        together=together,
    )


def _in_chunk(action: Action) -> bool:
    """Whether a task belongs to a block: embedding and head are passes of their own."""
    return action.op not in ("embed", "head")
