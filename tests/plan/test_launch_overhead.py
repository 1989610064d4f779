"""What collectives take of compute."""

import pytest

from moe_jax.plan.launch_overhead import NO_OVERHEAD, LaunchOverhead, with_launch_overhead
from moe_jax.plan.simulate import simulate
from moe_jax.plan.task_times import Linear
from moe_jax.schedule.actions import Action, Stream, two_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.schedule import Schedule
from tests.schedule.steps import schedules

OVERHEAD = LaunchOverhead(start=Linear(1.0, 0.1), finish=Linear(2.0, 0.2))  # of 10 bytes: 2 s and 4 s


def ten(action: Action) -> float:
    return 10.0


def extra_s(schedule: Schedule) -> dict[str, float]:
    """The extra seconds of tasks that take longer."""
    seconds = with_launch_overhead(schedule, lambda action: 1.0, two_streams, OVERHEAD, ten)
    return {str(action): seconds(action) - 1 for action in schedule.actions if seconds(action) > 1}


def test_tasks_hand_over_what_leaves_after_them_and_take_back_what_they_need_first() -> None:
    shape = make_shape("vanilla", ("moe",), 1, 1, 1, weight_grad="inline", grad_reduce="block", reductions=(1, 1, 1))
    found = extra_s(make_schedule("vanilla", shape, lambda action: 1.0, two_streams))
    assert found == {
        "F.attend.0.0": 2 + 2,  # a dispatch starts, and the routers' counts
        "F.expert.0.0": 4 + 2,
        "F.head.0": 4,
        "B.head.0": 2 + 2,
        "B.expert.0.0": 4 + 2,
        "B.attend.0.0": 4 + 4 + 2,  # the routers' counts are needed
        "B.embed.0": 2 + 3 * 4,
    }


@pytest.mark.parametrize("schedule", schedules(seed=30)[::5], ids=lambda s: f"{s.policy}-{s.shape.grad_reduce}")
def test_every_collective_starts_and_ends_once(schedule: Schedule) -> None:
    """Of an exchange and a gather in a row, the first starts and the second ends in compute."""
    collectives = [
        action
        for action in schedule.actions
        if two_streams(action) is not Stream.COMPUTE and action.op not in ("gather", "scatter")
    ]
    assert sum(extra_s(schedule).values()) == pytest.approx(6 * len(collectives))


def test_what_is_free_changes_nothing() -> None:
    schedule = schedules(seed=30)[0]
    seconds = with_launch_overhead(schedule, lambda action: 1.0, two_streams, NO_OVERHEAD, ten)
    assert simulate(schedule, seconds, two_streams) == simulate(schedule, lambda action: 1.0, two_streams)
