"""A forward pass with a backward pass on one stage: that the order can run, and that the sides hide each other."""

import random
from functools import cache

import pytest

from moe_jax.schedule.actions import Action, Seconds, Stream, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.pipelines.tick import SIDES, coscheduled_tick, needs_inside, side_of
from moe_jax.schedule.shape import WEIGHT_GRADS, StepShape
from moe_jax.schedule.simulation import TimeSpan, simulate_streams
from tests.schedule.steps import MIXED, POLICIES, random_costs

EXCHANGES = ("dispatch", "combine")
STACKS = (*MIXED, ("moe",) * 6)
SEEDS = range(12)


def drawn(seed: int, policy: str, degree: int) -> tuple[StepShape, Seconds]:
    """A stage and its costs."""
    rng = random.Random(seed)
    kinds, weight_grad, sharded = rng.choice(STACKS), rng.choice(WEIGHT_GRADS), rng.random() < 0.5
    shape = make_shape(policy, kinds, degree, weight_grad=weight_grad, sharded_experts=sharded)
    return shape, random_costs(seed, shape).of(shape)


def spans_of(order: list[Action], shape: StepShape, seconds: Seconds) -> dict[Action, TimeSpan]:
    return simulate_streams(order, needs_inside(order, shape), seconds, three_streams)


def time_s(order: list[Action], shape: StepShape, seconds: Seconds) -> float:
    return max(span.end_s for span in spans_of(order, shape, seconds).values())


@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_a_tick_is_a_forward_and_a_backward_pass(policy, degree):
    """Every task once, after what it needs; each side on each stream in its policy's order."""
    for seed in SEEDS:
        shape, seconds = drawn(seed, policy, degree)
        tick = coscheduled_tick(policy, shape, seconds)
        order = [action for _, action in tick]
        assert all(side == ("F" if action.direction in "FG" else "B") for side, action in tick)
        assert sorted(order) == sorted(action for action in task_graph(shape) if not is_reduction(action))
        issued: set[Action] = set()
        for action in order:
            of_other_side = {need for need in task_graph(shape)[action] if side_of(need) != side_of(action)}
            assert task_graph(shape)[action] - of_other_side <= issued
            assert all(need.direction in "FG" for need in of_other_side), "forward must not wait for backward"
            issued.add(action)
        alone = make_schedule(policy, shape, seconds).actions
        for side in SIDES:
            for stream in Stream:
                own, expected = (
                    [a for a in tasks if side_of(a) == side and three_streams(a) == stream and a.direction != "W"]
                    for tasks in (order, alone)
                )
                assert own == [action for action in expected if not is_reduction(action)]


@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_never_slower_than_one_side_after_the_other(policy, degree):
    saved = []
    for seed in SEEDS:
        shape, seconds = drawn(seed, policy, degree)
        order = [action for _, action in coscheduled_tick(policy, shape, seconds)]
        alone_s = sum(time_s([a for a in order if side_of(a) == side], shape, seconds) for side in SIDES)
        together_s = time_s(order, shape, seconds)
        assert together_s <= alone_s * (1 + 1e-9)
        if "moe" in shape.kinds:  # dense blocks have no exchanges
            saved.append(1 - together_s / alone_s)
    assert sum(saved) / len(saved) > (0.25 if policy == "vanilla" else 0.03)


@pytest.mark.parametrize("kinds", [kinds for kinds in STACKS if "moe" in kinds])
def test_every_forward_exchange_runs_concurrently_with_backward_compute(kinds):
    """If no exchange is longer than the shortest compute task. Backward has more to compute, so its last exchanges may
    be left alone: at most those of the lowest block."""
    for seed in SEEDS:
        shape = make_shape("vanilla", kinds)
        costs = random_costs(seed, shape).of(shape)
        shortest = min(costs(task) for task in task_graph(shape) if task.op in ("attend", "expert", "head"))
        longest = max(costs(task) for task in task_graph(shape) if task.op in EXCHANGES)

        def seconds(action: Action, costs=costs, scale=0.99 * shortest / longest) -> float:
            return costs(action) * (scale if action.op in EXCHANGES else 1)

        order = [action for _, action in coscheduled_tick("vanilla", shape, seconds)]
        spans = spans_of(order, shape, seconds)
        for exchange in (action for action in order if action.op in EXCHANGES):
            concurrent = [
                action
                for action in order
                if side_of(action) != side_of(exchange) and three_streams(action) == Stream.COMPUTE
                if _overlap(spans[action], spans[exchange])
            ]
            assert concurrent or (exchange.direction == "B" and exchange.block == kinds.index("moe")), str(exchange)


def _overlap(one: TimeSpan, other: TimeSpan) -> bool:
    return one.start_s < other.end_s and other.start_s < one.end_s


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_two_chains_take_hardly_longer_than_they_have_to(scale):
    """Against the fastest of all orders, exchanges being `scale` times as long as drawn."""
    ratios = []
    for seed in range(40):
        shape = make_shape("vanilla", random.Random(seed).choice(STACKS))
        costs = random_costs(seed, shape).of(shape)

        def seconds(action: Action, costs=costs) -> float:
            return costs(action) * (scale if action.op in EXCHANGES else 0 if action.direction == "G" else 1)

        order = [action for _, action in coscheduled_tick("vanilla", shape, seconds) if action.direction != "G"]
        chains = [[(three_streams(a), seconds(a)) for a in order if side_of(a) == side] for side in SIDES]
        ratios.append(time_s(order, shape, seconds) / fastest_s(*chains))
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.1
    assert sum(ratios) / len(ratios) < 1.01


def fastest_s(*chains: list[tuple[Stream, float]]) -> float:
    """The slow reference: two jobs on machines that run one task at a time; whenever both want one, try either first.

    Akers 1956: only what is left of both at such a moment matters.
    """

    @cache
    def left_s(*places: int) -> float:
        at, now_s = list(places), [0.0, 0.0]
        while all(place < len(chain) for place, chain in zip(at, chains, strict=True)):
            streams, lengths_s = zip(*(chain[place] for place, chain in zip(at, chains, strict=True)), strict=True)
            ends_s = [now + length for now, length in zip(now_s, lengths_s, strict=True)]
            if streams[0] == streams[1] and now_s[0] < ends_s[1] and now_s[1] < ends_s[0]:
                return min(ends_s[0] + left_s(at[0] + 1, at[1]), ends_s[1] + left_s(at[0], at[1] + 1))
            sooner = int(ends_s[1] < ends_s[0])
            now_s[sooner] = ends_s[sooner]
            at[sooner] += 1
        return max(
            now + sum(length_s for _, length_s in chain[place:])
            for now, place, chain in zip(now_s, at, chains, strict=True)
        )

    return left_s(0, 0)
