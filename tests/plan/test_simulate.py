"""The simulator against slow references and against what the papers derive by hand."""

import itertools
import random

import pytest

from moe_jax.plan.simulate import Timeline, simulate
from moe_jax.plan.task_times import ComputeStage, Linear, TaskTimes, Transfer
from moe_jax.schedule.actions import Action, ScheduleError, Stream, is_reduction, three_streams, two_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.grad_buckets import exchanges_first
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import WEIGHT_GRADS
from moe_jax.schedule.simulation import BackgroundSum, Interference, NumberedTasks, simulate_numbered
from tests.schedule.steps import schedules


def _whole_seconds(schedule: Schedule, seed: int) -> dict[Action, int]:
    rng = random.Random(seed)
    return {action: rng.randint(1, 9) for action in schedule.actions}


def _slow_starts(schedule, seconds):
    """Raise every start until each is after its stream's task before and all that it needs."""
    needs, start, last = task_graph(schedule.shape), dict.fromkeys(schedule.actions, 0), {}
    earlier = {}
    for action in schedule.actions:
        stream = two_streams(action)
        earlier[action] = set(needs[action]) | ({last[stream]} if stream in last else set())
        last[stream] = action
    while True:
        raised = {a: max((start[b] + seconds[b] for b in earlier[a]), default=0) for a in schedule.actions}
        if raised == start:
            return start
        start = raised


@pytest.mark.parametrize("schedule", schedules(seed=20)[::3], ids=lambda s: f"{s.policy}-{s.shape.grad_reduce}")
def test_times_exposure_and_memory_equal_slow_references(schedule):
    seconds = _whole_seconds(schedule, seed=0)
    timeline = simulate(schedule, seconds.__getitem__, two_streams)
    start = _slow_starts(schedule, seconds)
    assert {task.action: task.start_s for task in timeline.tasks} == start

    slots = {stream: set() for stream in Stream}
    for action, begin in start.items():
        slots[two_streams(action)] |= set(range(begin, begin + seconds[action]))
    assert timeline.exposed_s == len(slots[Stream.COMMUNICATION] - slots[Stream.COMPUTE])
    assert timeline.busy_s == {stream: len(busy) for stream, busy in slots.items()}

    held = _whole_seconds(schedule, seed=1)
    users = {a: [b for b in start if a in task_graph(schedule.shape)[b]] for a in start}
    until = {a: max((start[b] + seconds[b] for b in users[a]), default=timeline.makespan_s) for a in start}
    live = [sum(held[a] for a in start if start[a] <= t < until[a]) for t in range(int(timeline.makespan_s))]
    assert timeline.peak_bytes(held.__getitem__) == max(live)


@pytest.mark.parametrize("schedule", schedules(seed=22)[::5], ids=lambda s: f"{s.policy}-{s.shape.grad_reduce}")
def test_compute_and_communication_at_once_delay_each_other(schedule):
    """Every task starts as soon as it may, and does its work at the speed of each moment: no other times do both.

    A collective that follows another one on its stream at once starts in no time.
    """
    seconds = _whole_seconds(schedule, seed=0)
    interference = Interference(slowdown=(1.5, 2.0), start_s=(0.25, 0.5))
    timeline = simulate(schedule, seconds.__getitem__, three_streams, interference=interference)
    span = {task.action: task for task in timeline.tasks}
    moments = sorted({moment for task in span.values() for moment in (task.start_s, task.end_s)})

    def running(moment, until):
        return {task.stream for task in span.values() if task.start_s <= moment and until <= task.end_s}

    def work(task):
        """What it does between each two moments, in which compute takes 1, 1.5, 2 or 2.5 times as long."""
        done = 0.0
        for moment, until in itertools.pairwise(moments):
            if task.start_s <= moment and until <= task.end_s:
                streams = running(moment, until)
                slower = 0.5 * (Stream.COMMUNICATION in streams) + 1.0 * (Stream.INTRA_NODE in streams)
                done += (until - moment) / (1 + slower if task.stream == Stream.COMPUTE else 1)
        return done

    def more_s(task):
        computes = Stream.COMPUTE in running(task.start_s, moments[moments.index(task.start_s) + 1])
        follows = any(each.end_s == task.start_s for each in span.values() if each.stream == task.stream)
        later_s = {Stream.COMMUNICATION: 0.25, Stream.INTRA_NODE: 0.5}
        return later_s.get(task.stream, 0.0) if computes and not follows else 0.0

    needs, last = task_graph(schedule.shape), {}
    for action in schedule.actions:
        task = span[action]
        earlier = [*needs[action], *([last[task.stream]] if task.stream in last else [])]
        assert task.start_s == pytest.approx(max((span[each].end_s for each in earlier), default=0.0))
        last[task.stream] = action
        assert work(task) == pytest.approx(seconds[action] + more_s(task))


def test_between_the_halves_of_a_sum_goes_what_is_more_urgent():
    """Three compute tasks of 1, 1 and 3 s; a sum of 4 s after the first, and an exchange of 2 s after the second."""
    first, second, third = (Action("F", "attend", block, 0) for block in range(3))
    exchange, reduction = Action("F", "dispatch", 0, 0), Action("G", "reduce", 0, 0)
    needs = {each: frozenset[Action]() for each in (first, second, third)}
    tasks = NumberedTasks.of(needs | {reduction: frozenset([first]), exchange: frozenset([second])})
    streams, ranks = list(map(two_streams, tasks.tasks)), list(map(exchanges_first, tasks.tasks))
    interference = Interference(slowdown=(1.5, 3.0))

    def spans(halves, inside_s):
        own = {tasks.number[reduction]: BackgroundSum(inside_s, halves)}
        found = simulate_numbered(range(5), tasks, [1, 1, 3, 4, 2], streams, ranks, interference, own)
        ends = {str(task): found.end_s[tasks.number[task]] for task in (second, third, reduction, exchange)}
        return ends, found.paused_s

    ends, paused_s = spans(False, 0.0)
    assert ends == {"F.attend.1.0": 2.5, "F.attend.2.0": 7.0, "G.reduce.0.0": 5.0, "F.dispatch.0.0": 7.0}
    assert paused_s == {}
    ends, paused_s = spans(True, 0.0)
    assert ends == {"F.attend.1.0": 2.5, "F.attend.2.0": 7.0, "G.reduce.0.0": 7.0, "F.dispatch.0.0": 5.0}
    assert paused_s == {tasks.number[reduction]: 2.0}
    # what is passed on inside of nodes slows compute down, too: by 2 for a second of 4
    ends, _ = spans(False, 1.0)
    third_s = 7 + 2 / 3  # 1 of its 3 s until the sum ends, 4/3 until the exchange ends, and the rest alone
    expected = {"F.attend.1.0": 3.0, "F.attend.2.0": third_s, "G.reduce.0.0": 5.0, "F.dispatch.0.0": 7.0}
    assert ends == pytest.approx(expected)


@pytest.mark.parametrize("schedule", schedules(seed=23)[::7], ids=lambda s: f"{s.policy}-{s.shape.grad_reduce}")
def test_a_step_ends_when_its_sums_have_been_passed_on(schedule):
    seconds = _whole_seconds(schedule, seed=0)
    reductions = list(filter(is_reduction, schedule.actions))
    plain = simulate(schedule, seconds.__getitem__, two_streams)
    late = {task: BackgroundSum(2.0, halves=True) for task in reductions}
    timeline = simulate(schedule, seconds.__getitem__, two_streams, sums=late)
    ends_s = {task.action: task.end_s + 2.0 * (task.action in late) for task in timeline.tasks}
    assert timeline.makespan_s == max(ends_s.values())
    assert timeline.busy_s == plain.busy_s  # in list order nothing goes between halves
    assert timeline.busy_with_s(is_reduction) == sum(map(seconds.__getitem__, reductions))


def test_an_order_that_cannot_run_is_named():
    schedule = schedules(seed=21)[0]
    actions = list(schedule.actions)
    i, j = actions.index(Action.parse("F.attend.0.0")), actions.index(Action.parse("B.attend.0.0"))
    actions[i], actions[j] = actions[j], actions[i]
    with pytest.raises(ScheduleError, match=r"B\.attend\.0\.0 waits for"):
        simulate(Schedule(schedule.policy, schedule.shape, tuple(actions)), lambda _: 1.0)


def test_a_part_pays_the_start_up_time_in_full():
    link = Linear(alpha_s=2.0, beta_s=0.5)
    assert link.seconds(100) == 52
    assert 4 * link.seconds(100, parts=4) == 58


def test_a_backward_task_with_its_weight_gradient_takes_the_time_of_both():
    """FSMoE doubles the start-up time, too. If this breaks, placements are compared on different work."""
    compute = ComputeStage(rate=Linear(1.0, 0.5), forward=4, backward=6, weight=8)
    unit = Transfer(link=Linear(1.0, 1.0), num_bytes=8)
    times = TaskTimes(
        compute=dict.fromkeys(("embed", "attend", "expert", "head"), compute),
        transfer={"dispatch": unit, "combine": unit},
        reduce=Linear(0.5, 1.0),
        reduction_bytes=((1.0,), (2.0, 3.0), (4.0,)),
        counts_bytes=7.0,
    )
    inline, split = (make_shape("unified", ["moe"], 2, weight_grad=mode, reductions=(1, 2, 1)) for mode in WEIGHT_GRADS)
    cases = {"F.expert.0.0": 2.0, "B.expert.0.0": 2.5, "W.expert.0.0": 3.0, "B.dispatch.0.1": 5.0}
    cases |= {"G.reduce.0.1": 3.5, "G.embed.0": 1.5, "G.head.0": 4.5, "G.counts.0": 7.5}
    for name, seconds in cases.items():
        assert times.of(split)(Action.parse(name)) == seconds
    assert times.of(inline)(Action.parse("B.expert.0.0")) == 2.5 + 3.0


def _uniform(policy: str, degree: int, blocks: int, part_s: dict[str, float]) -> Timeline:
    """Blocks of equal tasks, forward and backward; embedding, head and reductions take no time."""
    shape = make_shape(policy, ("moe",) * blocks, degree)

    def seconds(action: Action) -> float:
        return part_s.get(action.op, 0.0)

    return simulate(make_schedule(policy, shape, seconds), seconds)


@pytest.mark.parametrize(("blocks", "degree"), [(1, 2), (1, 4), (2, 3), (5, 2), (5, 4)])
def test_uniform_blocks_take_what_the_orders_say(blocks, degree):
    """FlowMoE's orders by hand; seconds of one microbatch: a attention, d dispatch, e experts, c combine.

    Exchanges slower than compute: the link never rests between the first attention and the last one backward.
    Compute slower: only the last combine forward and the first one backward are exposed.
    """
    rounds = blocks * degree
    for a, d, e, c in ((1.0, 2.0, 1.5, 3.0), (2.0, 2.0, 2.0, 2.0), (0.1, 1.0, 0.9, 1.0)):
        slow_link = _uniform("unified", degree, blocks, {"attend": a, "dispatch": d, "expert": e, "combine": c})
        assert slow_link.makespan_s == pytest.approx(a + 2 * rounds * (d + c) + a)
    for a, d, e, c in ((2.0, 1.0, 3.0, 1.5), (2.0, 2.0, 2.0, 2.0), (1.0, 0.1, 0.9, 0.3)):
        slow_compute = _uniform("unified", degree, blocks, {"attend": a, "dispatch": d, "expert": e, "combine": c})
        assert slow_compute.makespan_s == pytest.approx(2 * rounds * (a + e) + 2 * c)
        assert slow_compute.exposed_s == pytest.approx(2 * c)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_expert_pipeline_takes_the_longest_path_of_each_layer(degree):
    rng = random.Random(degree)
    for _ in range(20):
        a, d, e = rng.uniform(0.1, 2), rng.uniform(0.1, 2), rng.uniform(0.1, 2)
        timeline = _uniform("expert_pipeline", degree, 3, {"attend": a, "dispatch": d, "expert": e, "combine": d})
        layer = max(2 * degree * d, 2 * d + degree * e, (degree + 1) * d + e)
        assert timeline.makespan_s == pytest.approx(6 * (a + layer))
