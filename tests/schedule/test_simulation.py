"""The simulator of numbered tasks against a slow reference that asks at each time what may start: equal times."""

import random
from collections.abc import Callable

import pytest

from moe_jax.schedule.actions import Action, Seconds, Stream, two_streams
from moe_jax.schedule.build import streams_of
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.grad_buckets import exchanges_first
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.simulation import (
    NumberedTasks,
    in_list_order,
    interleave,
    makespan_s,
    numbered_tasks,
    simulate_numbered,
    simulate_streams,
)
from tests.schedule.steps import random_costs, schedules

SCHEDULES = [schedule for seed in range(3) for schedule in schedules(seed)]
Spans = dict[Action, tuple[float, float]]


def slow_spans(schedule: Schedule, needs: Needs, seconds: Seconds, rank_of: Callable[[Action], int]) -> Spans:
    """Each time anything ends, free streams start the first ready task of the lowest rank, one after another."""
    left, running, ended_s, started = list(schedule.actions), dict[Stream, Action](), dict[Action, float](), Spans()
    now_s = 0.0
    while left or running:
        while True:
            heads = {(rank_of(task), two_streams(task)): task for task in reversed(left)}
            free = [
                task
                for (_, stream), task in sorted(heads.items())
                if stream not in running and needs[task] <= ended_s.keys()
            ]
            if not free:
                break
            left.remove(free[0])
            started[free[0]] = now_s, now_s + seconds(free[0])
            running[two_streams(free[0])] = free[0]
            if not seconds(free[0]):
                break
        now_s = min(started[task][1] for task in running.values())
        for stream, task in list(running.items()):
            if started[task][1] == now_s:
                ended_s[task] = now_s
                del running[stream]
    return started


@pytest.mark.parametrize("rank_of", [in_list_order, exchanges_first])
@pytest.mark.parametrize("schedule", SCHEDULES[::4], ids=lambda each: f"{each.policy}-{each.shape.grad_reduce}")
def test_tasks_start_and_end_as_in_the_slow_reference_in_the_same_order(
    schedule: Schedule, rank_of: Callable[[Action], int]
) -> None:
    needs, costs = task_graph(schedule.shape), random_costs(1, schedule.shape).of(schedule.shape)
    for seconds in (costs, lambda task: float(random.Random(str(task)).choice((0, 1, 1, 2)))):
        found = simulate_streams(schedule.actions, needs, seconds, two_streams, rank_of)
        assert list(found.items()) == list(slow_spans(schedule, needs, seconds, rank_of).items())


@pytest.mark.parametrize("schedule", SCHEDULES[::3], ids=lambda each: f"{each.policy}-{each.shape.grad_reduce}")
def test_the_end_of_a_step_in_list_order_is_that_of_its_simulation(schedule: Schedule) -> None:
    tasks, streams = numbered_tasks(schedule.shape), streams_of(schedule.shape, two_streams)
    times_s = list(map(random_costs(2, schedule.shape).of(schedule.shape), tasks.tasks))
    order = tasks.numbers(schedule.actions)
    _, end_s, _ = simulate_numbered(order, tasks, times_s, streams, [0] * len(streams))
    assert makespan_s(order, tasks, times_s, streams) == max(end_s.values())
    assert makespan_s(order[::-1], tasks, times_s, streams) == float("inf")
    assert makespan_s(order[1:], tasks, times_s, streams) == float("inf")


@pytest.mark.parametrize("schedule", SCHEDULES[::5], ids=lambda each: f"{each.policy}-{each.shape.grad_reduce}")
def test_communication_is_issued_right_after_what_it_needs(schedule: Schedule) -> None:
    needs = task_graph(schedule.shape)
    compute = [task for task in schedule.actions if two_streams(task) == Stream.COMPUTE]
    lane = [task for task in schedule.actions if two_streams(task) != Stream.COMPUTE]
    tasks, slow = numbered_tasks(schedule.shape), list[Action]()
    issued = tasks.actions(interleave(tasks.numbers(compute), [tasks.numbers(lane)], tasks))
    for task in [None, *compute]:
        slow += [task] if task else []
        while lane and needs[lane[0]] <= set(slow):
            slow.append(lane.pop(0))
    assert issued == slow


def test_tasks_that_need_one_more_wait_for_it() -> None:
    first, second, missing = (Action("F", "attend", block, 0) for block in range(3))
    tasks = NumberedTasks.of({first: frozenset(), second: frozenset({missing})})
    assert tasks.numbers([first, second, missing]) == [0, 1, 2]
    more = tasks.with_needs({0: 1})
    assert (more.needs[0], more.followers[1], list(more.waiting)) == ((1,), (0,), [1, 1])
    assert (tasks.needs[0], list(tasks.waiting)) == ((), [0, 1])
