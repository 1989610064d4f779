"""Scanned schedules: the whole list can run, and all iterations of a scan have one body."""

import pytest

from moe_jax.schedule.actions import Action, Stream, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.scanned import ScannedBlocks, ScannedSchedule, make_scanned
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import GRAD_REDUCES, WEIGHT_GRADS
from tests.schedule.steps import POLICIES, random_costs

DEEP = {
    "pairs": (("moe",) * 8, ScannedBlocks(0, 2, 4)),
    "dense-below": (("dense", *("moe",) * 5), ScannedBlocks(1, 1, 5)),
    "mixed, left over": (("dense", "moe") * 7 + ("dense",), ScannedBlocks(0, 4, 3)),
    "dense": (("dense",) * 4, ScannedBlocks(0, 1, 4)),
}
REDUCES = [(weight_grad, reduce) for weight_grad in WEIGHT_GRADS for reduce in GRAD_REDUCES]


def looped(name: str, seed: int, policy: str, degree: int, **rest: object) -> tuple[Schedule, ScannedSchedule]:
    kinds, blocks = DEEP[name]
    shape = make_shape(policy, kinds, degree, reductions=(2,) * (len(kinds) + 2), **rest)
    return make_scanned(policy, shape, blocks, random_costs(seed, shape).of(shape))


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_every_task_runs_once_and_after_what_it_needs(name, policy, degree):
    for seed, (weight_grad, grad_reduce) in enumerate(REDUCES):
        for rest in ({}, {"tied": True}, {"local_experts": True}):
            schedule, parts = looped(
                name, seed, policy, degree, weight_grad=weight_grad, grad_reduce=grad_reduce, **rest
            )
            check(schedule)
            bare = parts.without_reductions().actions()
            assert bare == tuple(task for task in schedule.actions if not is_reduction(task))
            assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", DEEP)
def test_a_turn_is_done_before_the_next_but_for_its_reductions(name):
    """What a loop cannot overlap must not look overlapped in the list: it is timed and compared with the program."""
    schedule, _ = looped(name, 1, "unified", 2, weight_grad="greedy", grad_reduce="bucketed")
    blocks = DEEP[name][1]
    for direction, order in (("F", 1), ("BW", -1)):
        tasks = [task for task in schedule.actions if task.direction in direction and blocks.iteration_of(task) >= 0]
        tasks = [task for task in tasks if blocks.iteration_of(task) < blocks.count]
        numbers = [blocks.iteration_of(task) for task in tasks][::order]
        assert numbers == sorted(numbers)


def test_reductions_lie_between_the_tasks_of_the_turn_below():
    schedule, parts = looped("pairs", 3, "unified", 2, weight_grad="greedy", grad_reduce="bucketed")
    blocks = parts.blocks
    place = {task: i for i, task in enumerate(schedule.actions)}
    for iteration in range(1, blocks.count):
        below = [
            i for task, i in place.items() if task.direction in "BW" and blocks.iteration_of(task) == iteration - 1
        ]
        sums = [i for task, i in place.items() if is_reduction(task) and blocks.iteration_of(task) == iteration]
        assert sums
        assert all(min(below) < i < max(below) for i in sums)


def test_what_is_issued_per_turn_does_not_grow_with_depth():
    sizes = []
    for num_blocks in (6, 12, 48):
        shape = make_shape("unified", ("moe",) * num_blocks, 2, weight_grad="greedy", grad_reduce="bucketed")
        _, parts = make_scanned(
            "unified", shape, ScannedBlocks(0, 2, num_blocks // 2), random_costs(0, shape).of(shape)
        )
        sizes.append([len(part) for part in parts if isinstance(part, tuple)])
    assert sizes[0] == sizes[1] == sizes[2]


def test_compute_inside_a_turn_is_ordered_as_without_loops():
    """An iteration that starts with idle streams must still interleave its microbatches."""
    _, parts = looped("pairs", 0, "unified", 2)
    kinds, blocks = DEEP["pairs"]
    shape = make_shape("unified", kinds, 2)
    flat = make_schedule("unified", shape, random_costs(0, shape).of(shape)).actions

    def compute(actions: tuple[Action, ...]) -> list[str]:
        return [str(task) for task in actions if three_streams(task) == Stream.COMPUTE]

    of_iteration_0 = [task for task in flat if task.direction == "F" and blocks.iteration_of(task) == 0]
    assert compute(parts.forward_body) == compute(tuple(of_iteration_0))


@pytest.mark.parametrize(
    ("repeats", "unroll", "expected"),
    [
        (2, 1, None),
        (5, 2, None),
        (3, 1, ScannedBlocks(4, 3, 3)),
        (7, 2, ScannedBlocks(4, 6, 3)),
        (8, 2, ScannedBlocks(4, 6, 4)),
    ],
)
def test_few_turns_are_no_loop_and_left_over_periods_stay_above(repeats, unroll, expected):
    assert ScannedBlocks.of(4, 3, repeats, unroll) == expected
