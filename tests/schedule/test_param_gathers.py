"""Gathers of sharded parameters as tasks: when they are issued, and how many blocks a device has at a time."""

import dataclasses
from typing import Any

import pytest

from moe_jax.plan.simulate import simulate
from moe_jax.schedule.actions import Action, is_param_gather, three_streams, two_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.grad_buckets import exchanges_first
from moe_jax.schedule.scanned import ScannedBlocks, make_scanned
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape
from tests.schedule.steps import MIXED, POLICIES, nominal

AHEAD = {"prefetch": 1, "block": 0}


def step_of(policy: str, degree: int, kinds: tuple[str, ...], gather: str, **rest: Any) -> Schedule:
    shape = make_shape(policy, kinds, degree, param_gather=gather, **rest)
    return make_schedule(policy, shape, seconds_of(shape))


def seconds_of(shape: StepShape, gather: float = 0.2):
    ends = [{"embed": gather}], [{"head": gather}]
    owners = (*ends[0], *({"attend": gather, "expert": gather} for _ in shape.kinds), *ends[1])
    return dataclasses.replace(nominal(shape), gather_bytes=owners).of(shape)


@pytest.mark.parametrize("gather", AHEAD)
@pytest.mark.parametrize("weight_grad", ["inline", "greedy"])
@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_parameters_are_there_in_time_and_not_much_earlier(policy, degree, weight_grad, gather):
    for kinds in MIXED:
        step = step_of(policy, degree, kinds, gather, weight_grad=weight_grad, grad_reduce="bucketed")
        check(step)
        place = {task: i for i, task in enumerate(step.actions)}
        assert {task for task in place if is_param_gather(task)} == set(step.shape.param_gathers)
        assert most_waiting_blocks(step) <= 1 + AHEAD[gather]


def most_waiting_blocks(step: Schedule) -> int:
    """Blocks whose parameters have been gathered for a pass of which no task has run yet."""
    waiting: set[tuple[int, int]] = set()
    most = 0
    for task in step.actions:
        if is_param_gather(task) and task.block >= 0:
            waiting.add((task.block, task.part))
        elif (gather := step.shape.param_gather_of(task)) is not None:
            waiting.discard((gather.block, gather.part))
        most = max(most, len(waiting))
    return most


@pytest.mark.parametrize("gather", AHEAD)
def test_experts_that_no_other_device_has_are_not_gathered(gather):
    step = step_of("unified", 2, MIXED[0], gather, local_experts=True)
    check(step)
    found = {task.op for task in step.actions if is_param_gather(task)}
    assert found == {"embed", "attend", "head"} == {task.op for task in step.shape.param_gathers}


def test_they_fill_gaps():
    """Exchanges keep the link busy for 60 % of the time, and gathers take a third of the rest."""
    kinds = ("moe",) * 6

    def step_s(gather: str) -> float:
        step = step_of("unified", 2, kinds, gather)
        seconds = seconds_of(step.shape, 0.1)

        def shorter(task: Action) -> float:
            return seconds(task) * (0.6 if task.op in ("dispatch", "combine") else 1)

        return simulate(step, shorter, three_streams, exchanges_first).makespan_s

    first = 0.2  # the embedding, and attention of the lowest block
    assert step_s("prefetch") == pytest.approx(step_s("none") + first)
    assert step_s("block") > step_s("none") + 20 * 0.1


@pytest.mark.parametrize("gather", AHEAD)
@pytest.mark.parametrize("grad_reduce", ["end", "block", "bucketed"])
@pytest.mark.parametrize("kinds", [("moe",) * 5, ("dense", *("moe", "dense") * 3), ("dense", *("moe",) * 4, "dense")])
def test_iterations_gather_for_the_next_one(kinds, grad_reduce, gather):
    period = 2 if kinds.count("dense") > 2 else 1
    first = 0 if kinds[0] == "moe" else 1
    repeats = {0: 5, 1: 3 if period == 2 else 4}[first]
    blocks = ScannedBlocks.of(first, period, repeats, 1)
    shape = make_shape("unified", kinds, 2, param_gather=gather, grad_reduce=grad_reduce)
    schedule, scanned = make_scanned("unified", shape, blocks, seconds_of(shape))
    check(schedule)
    bodies = {
        name: [task for task in getattr(scanned, name) if is_param_gather(task)]
        for name in ("forward_body", "backward_body")
    }
    own = range(first, first + period)
    for name, above in (("forward_body", period), ("backward_body", 0)):
        place = {task: i for i, task in enumerate(getattr(scanned, name))}
        for task in bodies[name]:  # the next parameters overwrite those of this iteration
            users = [each for each in place if each.direction in "FB" and each.op == task.op]
            assert place[task] > max(place[each] for each in users if each.block == task.block - above)
    assert {task.block for task in bodies["forward_body"]} == {block + period for block in own}
    assert {task.block for task in bodies["backward_body"]} == set(own)
    again = [task for task in schedule.actions if is_param_gather(task) and task.part == 1]
    assert len(again) == len(set(again)) == len([task for task in shape.param_gathers if task.part == 1])


@pytest.mark.parametrize("early", [True, False])
def test_early_gathers_need_memory_of_their_own(early):
    """An iteration's experts compute after the next one's weights were gathered, where gathers may take long."""
    shape, blocks = make_shape("unified", ("moe",) * 5, 2, param_gather="prefetch"), ScannedBlocks.of(0, 1, 5, 1)
    schedule, scanned = make_scanned("unified", shape, blocks, seconds_of(shape), gathers_early=early)
    check(schedule)
    for body in (scanned.forward_body, scanned.backward_body):
        (gather,) = (i for i, task in enumerate(body) if is_param_gather(task) and task.op == "expert")
        users = [i for i, task in enumerate(body) if task.direction in "FB" and task.op == "expert"]
        assert (gather < max(users)) == early


@pytest.mark.parametrize("seconds", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("early", [True, False])
def test_a_report_can_simulate_the_tasks_of_a_loop_as_listed(early, seconds):
    """The backward pass's first gather may be listed before the memory that a step without loops waits for."""
    shape, blocks = make_shape("unified", ("moe",) * 5, 2, param_gather="prefetch"), ScannedBlocks.of(0, 1, 5, 1)
    times = seconds_of(shape, seconds)
    schedule, _ = make_scanned("unified", shape, blocks, times, two_streams, gathers_early=early)
    listed = simulate(schedule, times, two_streams)
    assert set(listed.tasks)


def test_names_are_read_again():
    for name in ("P.embed.0", "P.attend.3.0", "P.expert.3.1", "P.head.0"):
        assert str(Action.parse(name)) == name
