"""Policies: the orders of the papers, that they can run, and what they gain."""

import pytest

from moe_jax.schedule.actions import ScheduleError, Stream, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check, task_graph
from moe_jax.schedule.shape import GRAD_REDUCES
from tests.schedule.steps import MIXED, nominal, random_step, schedules


@pytest.mark.parametrize("seed", range(4, 12))
def test_every_policy_and_placement_gives_a_schedule_that_runs(seed):
    for schedule in schedules(seed):
        check(schedule)


def _streams(policy, kinds, degree, **rest):
    shape = make_shape(policy, kinds, degree, **rest)
    actions = make_schedule(policy, shape, nominal(shape).of(shape)).actions
    return {stream: " ".join(str(a) for a in actions if three_streams(a) == stream) for stream in Stream}


def test_unified_runs_the_streams_in_flowmoe_order():
    """FlowMoE, eqs. 2-5: if this breaks, microbatches no longer hide each other's exchanges."""
    streams = _streams("unified", ["moe", "moe"], 2)
    forward, backward = streams[Stream.COMPUTE].split(" B.", 1)
    assert forward == (
        "F.embed.0 F.attend.0.0 F.embed.1 F.attend.0.1 F.expert.0.0 F.expert.0.1 "
        "F.attend.1.0 F.attend.1.1 F.expert.1.0 F.expert.1.1 F.head.0 F.head.1"
    )
    assert "B." + backward == (
        "B.head.1 B.head.0 B.expert.1.1 B.expert.1.0 B.attend.1.1 B.attend.1.0 "
        "B.expert.0.1 B.expert.0.0 B.attend.0.1 B.embed.1 B.attend.0.0 B.embed.0"
    )
    assert streams[Stream.COMMUNICATION] == (
        "F.dispatch.0.0 F.dispatch.0.1 F.combine.0.0 F.combine.0.1 "
        "F.dispatch.1.0 F.dispatch.1.1 F.combine.1.0 F.combine.1.1 G.counts.0 "
        "B.combine.1.1 B.combine.1.0 B.dispatch.1.1 B.dispatch.1.0 "
        "B.combine.0.1 B.combine.0.0 B.dispatch.0.1 B.dispatch.0.0 "
        "G.head.0 G.reduce.1.0 G.reduce.0.0 G.embed.0"
    )


def test_expert_pipeline_cuts_only_exchanges_and_experts():
    streams = _streams("expert_pipeline", ["dense", "moe"], 2)
    assert streams[Stream.COMPUTE] == (
        "F.embed.0 F.attend.0.0 F.attend.1.0 F.expert.1.0 F.expert.1.1 F.head.0 "
        "B.head.0 B.expert.1.1 B.expert.1.0 B.attend.1.0 B.attend.0.0 B.embed.0"
    )


def test_vanilla_overlaps_nothing():
    for kinds in MIXED:
        timeline = random_step(0, "vanilla", 1, kinds)
        assert timeline.makespan_s == pytest.approx(sum(timeline.busy_s.values()))
    with pytest.raises(ScheduleError, match=r"microbatches=2 .*vanilla"):
        make_shape("vanilla", ["moe"], 2)


def test_an_unknown_policy_is_answered_with_the_known_ones():
    with pytest.raises(ScheduleError, match=r"'unifed' is unknown: use vanilla, expert_pipeline, unified"):
        make_shape("unifed", ["moe"])


def test_a_block_is_reduced_at_once_but_after_every_pending_exchange():
    for schedule in schedules(seed=12) + schedules(seed=13):
        needs, actions = task_graph(schedule.shape), schedule.actions
        for i, action in enumerate(actions):
            if schedule.shape.grad_reduce != "block" or not is_reduction(action):
                continue
            issued = set(actions[:i])
            pending = [a for a in actions[i:] if a.op in ("dispatch", "combine") and needs[a] <= issued]
            assert not pending, f"{action} is issued before {pending[0]}"
            since = actions[max(actions.index(need) for need in needs[action]) + 1 : i]
            late = [a for a in since if three_streams(a) == Stream.COMPUTE]
            assert not late, f"{action} is issued after {late[0]}"


@pytest.mark.parametrize("grad_reduce", GRAD_REDUCES)
def test_an_expert_starts_after_its_own_dispatch_and_gather(grad_reduce):
    """A chunk's gather after the last dispatch would make the first expert wait for all of them."""
    shape = make_shape("expert_pipeline", ["moe"], 2, sharded_experts=True, grad_reduce=grad_reduce)
    text = str(make_schedule("expert_pipeline", shape, nominal(shape).of(shape)))
    assert "F.attend.0.0 F.dispatch.0.0 F.gather.0.0 F.dispatch.0.1 F.gather.0.1\nF.expert.0.0 F.scatter.0.0" in text


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize("seed", range(12))
def test_unified_is_never_slower_than_expert_pipeline_and_that_never_than_vanilla(kinds, seed):
    """Without start-up times every path through the finer step is part of one through the coarser.

    With reductions between the exchanges this needs experts in every block: a dense block below hides a reduction of
    the block above in a coarse step that stands between two microbatches' exchanges in a fine one.
    """
    modes = [("end", 1)] + ([("block", 1)] if "dense" not in kinds else [])
    for grad_reduce, chunks in modes:
        for degree in (2, 4):
            steps = [("vanilla", 1), ("expert_pipeline", degree), ("unified", degree)]
            vanilla, pipeline, unified = (
                random_step(seed, policy, r, kinds, "inline", grad_reduce, chunks).makespan_s for policy, r in steps
            )
            assert unified <= pipeline * (1 + 1e-9)
            assert pipeline <= vanilla * (1 + 1e-9)
            if "moe" in kinds:
                assert pipeline < vanilla
