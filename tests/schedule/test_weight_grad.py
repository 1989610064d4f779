"""Weight gradients in the gaps: which one is taken, and that the step never gets longer."""

import pytest

from moe_jax.plan.simulate import simulate
from moe_jax.schedule.actions import Action
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from tests.schedule.steps import MIXED, POLICIES, random_step


def test_the_closest_candidate_covers_each_exchange():
    """Lancet, alg. 1, by hand: exchanges take 1; the W of attention 0.2, dense 1.1, expert 0.9, head 0.3."""
    shape = make_shape("vanilla", ["moe", "dense", "moe"], weight_grad="greedy")
    weight_s = {"W.attend.2.0": 0.2, "W.attend.1.0": 1.1, "W.attend.0.0": 0.2, "W.head.0": 0.3}

    def seconds(action: Action) -> float:
        if action.direction == "W":
            return weight_s.get(str(action), 0.9)
        return 0.0 if action.direction == "G" else 1.0

    schedule = make_schedule("vanilla", shape, seconds)
    check(schedule)
    backward = [str(a) for a in schedule.actions if a.direction in "BW"]
    expected = (
        "B.head.0 B.combine.2.0 W.head.0 B.expert.2.0 B.dispatch.2.0 W.expert.2.0 B.attend.2.0 B.attend.1.0 "
        "B.combine.0.0 W.attend.1.0 B.expert.0.0 B.dispatch.0.0 W.expert.0.0 W.attend.2.0 "
        "B.attend.0.0 W.attend.0.0 B.embed.0"
    )
    assert " ".join(backward) == expected
    timeline = simulate(schedule, seconds)
    uncovered = (1 - 0.3) + (1 - 0.9)  # after combine.2 and dispatch.2; the others are covered
    assert timeline.exposed_s == pytest.approx(4 * 1.0 + uncovered)


def test_weight_gradients_at_the_end_run_oldest_first():
    """So that the first to be summed are complete first."""
    shape = make_shape("unified", ["moe", "moe"], 2, weight_grad="greedy", grad_reduce="block")
    slow_embedding = {"G.embed.0": 9.0}  # worth hiding behind all weight gradients
    seconds_of_b = {"combine": 0.0, "dispatch": 0.0}

    def seconds(action: Action) -> float:
        return slow_embedding.get(str(action), seconds_of_b.get(action.op, 0.1 if action.direction == "G" else 1.0))

    actions = make_schedule("unified", shape, seconds).actions
    assert actions.index(Action.parse("B.embed.0")) < actions.index(Action.parse("W.head.1"))
    backward = [a._replace(direction="W") for a in actions if a.direction == "B"]
    weights = [a for a in actions if a.direction == "W"]
    assert weights == [a for a in backward if a in weights]


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_greedy_never_lengthens_the_step(kinds, policy, degree):
    """Chunks are placed by simulated times, where one chunk in the wrong gap may cost its own time."""
    for seed in range(4):
        for grad_reduce, chunks in (("end", 1), ("block", 1), ("bucketed", 8)):
            inline = random_step(seed, policy, degree, kinds, "inline", grad_reduce, chunks)
            greedy = random_step(seed, policy, degree, kinds, "greedy", grad_reduce, chunks)
            one_chunk = max(t.end_s - t.start_s for t in greedy.tasks if t.action.direction == "G")
            slack = one_chunk if grad_reduce == "bucketed" else 1e-9
            assert greedy.makespan_s <= inline.makespan_s + slack
            assert sum(greedy.busy_s.values()) == pytest.approx(sum(inline.busy_s.values()))


@pytest.mark.parametrize("kinds", [kinds for kinds in MIXED if "moe" in kinds])
@pytest.mark.parametrize("grad_reduce", ["end", "block"])
def test_greedy_beats_inline_where_exchanges_are_exposed(kinds, grad_reduce):
    for seed in range(6):
        inline = random_step(seed, "vanilla", 1, kinds, "inline", grad_reduce)
        greedy = random_step(seed, "vanilla", 1, kinds, "greedy", grad_reduce)
        assert greedy.makespan_s < inline.makespan_s
        assert greedy.exposed_s < inline.exposed_s


def test_weight_gradients_that_wait_hold_memory():
    def saved(action: Action) -> float:
        return float(action.direction == "F" and action.op in ("attend", "expert", "head"))

    for seed in range(6):
        inline = random_step(seed, "vanilla", 1, ("moe",) * 3, "inline").peak_bytes(saved)
        greedy = random_step(seed, "vanilla", 1, ("moe",) * 3, "greedy").peak_bytes(saved)
        assert inline == 7  # the end of the forward pass
        assert greedy >= inline
