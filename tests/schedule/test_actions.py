"""Tasks and schedules as text: what is written reads back, what cannot be read is answered in one line."""

import pytest

from moe_jax.schedule.actions import Action, ScheduleError
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.schedule import Schedule
from tests.schedule.steps import schedules

SCHEDULES = schedules(seed=0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.policy}-{s.shape.weight_grad}-{s.shape.grad_reduce}")
def test_a_schedule_reads_back_from_its_text(schedule):
    text = str(schedule)
    assert Schedule.parse(text) == schedule
    assert str(Schedule.parse(text)) == text
    assert max(map(len, text.splitlines())) < 400, "a schedule should be readable line by line"


@pytest.mark.parametrize("schedule", SCHEDULES[:6])
def test_every_task_reads_back_and_has_a_name_of_its_own(schedule):
    tasks = list(task_graph(schedule.shape))
    assert [Action.parse(str(task)) for task in tasks] == tasks
    assert len(set(map(str, tasks))) == len(tasks)


def test_names():
    assert Action.parse("F.expert.3.1") == Action("F", "expert", 3, 1)
    assert str(Action("G", "reduce", 3, 2)) == "G.reduce.3.2"
    assert str(Action.parse("W.head.1")) == "W.head.1"


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("F.expert", "F.attend.3.0"),
        ("F.expert.3.1.2", "F.attend.3.0"),
        ("F.expert.-1.0", "F.attend.3.0"),
        ("X.expert.3.1", "F.attend.3.0"),
        ("F.expret.3.1", "dispatch"),
        ("W.dispatch.3.1", "attend, expert, head"),
        ("F.expert.1", "F.expert.3.0"),
        ("F.head.1.0", "F.head.0"),
    ],
)
def test_a_wrong_name_is_answered_with_a_right_one(text, cure):
    with pytest.raises(ScheduleError, match=rf"^'{text}' .*{cure}") as error:
        Action.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("policy: ", "plan: "),
        ("forward: ", "forward: a"),
        ("kinds: ", "kinds: sparse "),
        ("tied: ", "tied: un"),
        ("reductions: ", "reductions: 1 "),
        ("weight_grad: ", "weight_grad: no"),
    ],
)
def test_a_damaged_header_is_refused_in_one_line(old, new):
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(str(SCHEDULES[0]).replace(old, new, 1))
    assert "\n" not in str(error.value)
