"""What needs what, and that no damaged schedule passes."""

import random

import pytest

from moe_jax.schedule.actions import Action, ScheduleError
from moe_jax.schedule.build import make_shape
from moe_jax.schedule.dependencies import check, dependencies, task_graph
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import Parts, StepShape
from tests.schedule.steps import schedules

UNIFIED = make_shape("unified", ["moe", "moe"], 2)
CHUNKED = make_shape("expert_pipeline", ["moe", "moe"], 4, 2, weight_grad="greedy", grad_reduce="block")
COARSER = make_shape("unified", ["dense", "moe"], 4, 2, grad_reduce="block", tied=True)
MTP = make_shape("unified", ["moe", "dense"], 2, weight_grad="greedy", grad_reduce="block", mtp=True)
SHARDED = make_shape("unified", ["moe"], 2, sharded_experts=True)


@pytest.mark.parametrize(
    ("shape", "task", "needs"),
    [
        (UNIFIED, "F.embed.1", ""),
        (UNIFIED, "F.attend.0.0", "F.embed.0"),
        (UNIFIED, "F.attend.1.1", "F.combine.0.1 F.attend.1.0"),  # slots that microbatch 0 took
        (UNIFIED, "F.dispatch.1.1", "F.attend.1.1"),
        (UNIFIED, "F.expert.1.1", "F.dispatch.1.1"),
        (UNIFIED, "F.combine.1.1", "F.expert.1.1"),
        (UNIFIED, "F.head.1", "F.combine.1.1"),
        (UNIFIED, "G.counts.0", "F.attend.0.0 F.attend.0.1 F.attend.1.0 F.attend.1.1"),
        (UNIFIED, "B.head.1", "F.head.1"),
        (UNIFIED, "B.combine.1.1", "B.head.1"),
        (UNIFIED, "B.expert.1.1", "B.combine.1.1 F.expert.1.1"),
        (UNIFIED, "B.attend.1.1", "B.dispatch.1.1 F.attend.1.1 G.counts.0"),
        (UNIFIED, "B.embed.1", "B.attend.0.1 F.embed.1"),
        (CHUNKED, "F.dispatch.0.3", "F.attend.0.0"),
        (CHUNKED, "F.attend.1.0", "F.combine.0.0 F.combine.0.1 F.combine.0.2 F.combine.0.3"),
        (CHUNKED, "B.expert.1.1", "B.combine.1.1 F.expert.1.2 F.expert.1.3"),
        (CHUNKED, "W.expert.1.1", "B.expert.1.1 F.expert.1.2 F.expert.1.3"),
        (CHUNKED, "G.reduce.1.0", "W.attend.1.0 W.expert.1.0 W.expert.1.1"),
        (CHUNKED, "G.head.0", "W.head.0"),
        (CHUNKED, "G.embed.0", "B.embed.0"),
        (COARSER, "B.attend.0.1", "B.attend.1.1 F.attend.0.2 F.attend.0.3"),
        (COARSER, "G.embed.0", "B.embed.0 B.embed.1 B.head.0 B.head.1"),
        (MTP, "G.head.0", "W.head.0 W.head.1 W.attend.1.0 W.attend.1.1"),
        (MTP, "G.reduce.1.0", "W.attend.1.0 W.attend.1.1"),
        (SHARDED, "F.expert.0.1", "F.gather.0.1"),
        (SHARDED, "B.dispatch.0.1", "B.gather.0.1"),
    ],
)
def test_needs(shape, task, needs):
    assert dependencies(Action.parse(task), shape) == {Action.parse(need) for need in needs.split()}


def test_a_sum_at_the_end_needs_every_gradient_of_the_step():
    gradients = {task for task in task_graph(UNIFIED) if task.direction == "B" and task.op in ("attend", "expert")}
    ends = {task for task in task_graph(UNIFIED) if task.direction == "B" and task.op in ("embed", "head")}
    assert dependencies(Action.parse("G.reduce.1.0"), UNIFIED) == gradients | ends


@pytest.mark.parametrize("schedule", schedules(seed=1), ids=lambda s: s.policy)
def test_damage_is_named(schedule):
    """A task after one that needs it, dropped, doubled or foreign: the message names the tasks."""
    check(schedule)
    rng = random.Random(2)
    needs = task_graph(schedule.shape)
    for _ in range(12):
        actions = list(schedule.actions)
        action = rng.choice([task for task in actions if needs[task]])
        need = rng.choice(sorted(needs[action]))
        i, j = actions.index(need), actions.index(action)
        actions[i], actions[j] = action, need
        _refused(schedule, actions, f"{action} is before", str(need))

        dropped = list(schedule.actions)
        dropped.remove(need)
        first = next(task for task in dropped if need in needs[task])
        _refused(schedule, dropped, f"{need} is missing", f"{first} needs it")

        doubled = [*schedule.actions[:j], need, *schedule.actions[j:]]
        _refused(schedule, doubled, f"{need} is listed twice")

        foreign = action._replace(part=action.part + 1000)
        _refused(schedule, [foreign, *schedule.actions], str(foreign))


def test_a_dropped_last_task_is_named():
    for schedule in schedules(seed=3):
        _refused(schedule, schedule.actions[:-1], f"{schedule.actions[-1]} is missing")


def _refused(schedule, actions, *words):
    with pytest.raises(ScheduleError) as error:
        check(Schedule(schedule.policy, schedule.shape, tuple(actions)))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kinds": ()}, "kinds has"),
        ({"kinds": ("sparse",)}, "'sparse': use dense or moe"),
        ({"forward": Parts(2, 3)}, "forward: 3 chunks"),
        ({"forward": Parts(0, 0)}, "forward: 0 chunks"),
        ({"forward": Parts(4, 4), "backward": Parts(3, 3)}, "use a divisor"),
        ({"reductions": (1, 1)}, "3 counts"),
        ({"weight_grad": "lazy"}, "inline or greedy"),
        ({"grad_reduce": "never"}, "end or block or bucketed"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ScheduleError, match=words):
        StepShape(**({"kinds": ("moe",)} | fields))
