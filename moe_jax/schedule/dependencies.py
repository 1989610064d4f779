"""Dependencies between tasks, and a check that a list of tasks respects them."""

from collections.abc import Mapping
from functools import lru_cache

from moe_jax.schedule.actions import NO_BLOCK, Action, ScheduleError, is_param_gather, is_reduction
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import ChainStage, StepShape, is_compute, weight_gradient

Needs = Mapping[Action, frozenset[Action]]

_COUNTS = Action("G", "counts", NO_BLOCK, 0)


def dependencies(action: Action, shape: StepShape) -> frozenset[Action]:
    """The tasks that must end before `action` can start.

    - F: the parts of the previous stage that share its tokens. In a block with experts also the previous microbatch,
      because used capacity carries over.
    - B: the parts of the next stage, and the activations that its own forward task saved. In a block with experts also
      the router counts of the whole global batch, for the load-balance loss.
    - W: its B task and the same forward task.
    - P: nothing, or for the backward pass the forward pass's. F and B wait for their P.
    - G: every gradient of its owner, from all microbatches; with `grad_reduce="end"`, every gradient of the step.
    """
    if action.direction == "G":
        return frozenset(_gradients(action, shape))
    stage = ChainStage(action.op, action.block)
    if is_param_gather(action):
        return frozenset({action._replace(part=0)} if action.part else ())
    place = shape.place[stage]
    moe_attend = action.op == "attend" and shape.kinds[action.block] == "moe"
    gather = shape.param_gather_of(action)
    needs: set[Action] = set() if gather is None else {gather}
    if action.direction == "F":
        if place > 0:
            needs |= shape.overlapping("F", shape.stages[place - 1], action)
        if moe_attend and action.part > 0:
            needs.add(action._replace(part=action.part - 1))
        return frozenset(needs)
    if is_compute(stage):
        needs |= shape.overlapping("F", stage, action)
    if action.direction == "W":
        return frozenset(needs | {action._replace(direction="B")})
    if place < len(shape.stages) - 1:
        needs |= shape.overlapping("B", shape.stages[place + 1], action)
    return frozenset(needs | {_COUNTS} if moe_attend else needs)


def _gradients(action: Action, shape: StepShape) -> list[Action]:
    if action == _COUNTS:
        moe = [ChainStage("attend", block) for block, kind in enumerate(shape.kinds) if kind == "moe"]
        return [task for stage in moe for task in shape.tasks_of("F", stage)]
    owners = {"embed": 0, "head": len(shape.kinds) + 1}
    if shape.grad_reduce == "end":
        return [task for owner in range(len(shape.reductions)) for task in shape.gradients(owner)]
    return shape.reduced_gradients(owners.get(action.op, action.block + 1))


@lru_cache(maxsize=64)
def task_graph(shape: StepShape) -> Needs:
    """Map every task of a shape to the tasks that it needs."""
    graph = dict(_without_reductions(shape.unreduced))
    for sums in reductions_by_owner(shape):
        graph |= dict.fromkeys(sums, dependencies(sums[0], shape))
    return graph


@lru_cache(maxsize=64)
def _without_reductions(shape: StepShape) -> Needs:
    """The graph of all other tasks, which need no reduction and are alike in many shapes."""
    tasks: list[Action] = []
    for stage in shape.stages:
        backward = shape.tasks_of("B", stage)
        tasks += [*shape.tasks_of("F", stage), *backward]
        tasks += [weight for task in backward if (weight := weight_gradient(task, shape))]
    tasks += [_COUNTS] if "moe" in shape.kinds else []
    return {task: dependencies(task, shape) for task in [*tasks, *shape.param_gathers]}


@lru_cache(maxsize=64)
def reductions_by_owner(shape: StepShape) -> tuple[tuple[Action, ...], ...]:
    """The sums of each owner's gradients over devices, in the order in which the backward pass reaches the owners."""
    return tuple(filter(None, map(shape.reductions_of, reversed(range(len(shape.reductions))))))


def check(schedule: Schedule) -> None:
    """Raise ScheduleError if a task is missing, listed twice, unknown, or listed before a task that it needs."""
    needs = task_graph(schedule.shape)
    listed = set(schedule.actions)
    seen: set[Action] = set()
    for action in schedule.actions:
        if action not in needs:
            raise ScheduleError(f"{action} is no task of a step with these blocks and parts: take it out")
        if action in seen:
            raise ScheduleError(f"{action} is listed twice: take one out")
        early = sorted(needs[action] - seen)
        if missing := [task for task in early if task not in listed]:
            raise ScheduleError(f"{_names(missing)} is missing, and {action} needs it: add it before")
        if early:
            raise ScheduleError(f"{action} is before {_names(early)}, which it needs: move it after")
        seen.add(action)
    if missing := sorted(needs.keys() - seen):
        role = "sums gradients" if is_reduction(missing[0]) else "is part of the step"
        raise ScheduleError(f"{_names(missing)} is missing, and {role}: add it")


def _names(actions: list[Action]) -> str:
    return ", ".join(map(str, actions))
