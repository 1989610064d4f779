"""Chunked reductions: how gradients are cut, and FlowMoE's two theorems in simulation."""

from itertools import combinations, pairwise

import pytest

from moe_jax.errors import ConfigError
from moe_jax.plan.simulate import simulate
from moe_jax.schedule.actions import three_streams, two_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.grad_buckets import MAX_BUCKETS, exchanges_first, split_into_buckets
from tests.schedule.steps import MIXED, POLICIES, random_costs, random_step


@pytest.mark.parametrize("limit", [1, 7, 12, 24, 60, 61, 120, 480, 10_000])
def test_buckets_have_whole_slices(limit):
    """Sixteen matrices of 12 rows of 5 numbers: whole matrices, or whole rows of one, or single numbers."""
    buckets = split_into_buckets((960,), (limit + 0.5) * 4e-6, slices=((60, 5),))
    assert [bucket.start for bucket in buckets[1:]] == [bucket.stop for bucket in buckets[:-1]]
    assert (buckets[0].start, buckets[-1].stop) == (0, 960)
    unit = 60 if limit >= 60 else 5 if limit >= 5 else 1
    for bucket in buckets:
        assert bucket.start % unit == 0
        assert 0 < bucket.stop - bucket.start <= limit
        if unit < 60:
            assert bucket.start // 60 == (bucket.stop - 1) // 60


def test_too_many_buckets_are_counted_before_they_are_made():
    with pytest.raises(ConfigError, match="into 10000000000000 buckets"):
        split_into_buckets((10**13,), 1e-6, slices=((10**6, 1),))


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.001, 0.01, 0.0123, 5.0])
def test_chunks_cover_every_element_once_and_stay_below_the_limit(bucket_cap_mb):
    sizes = (12_345, 0, 1, 100_000)
    chunks = split_into_buckets(sizes, bucket_cap_mb)
    for group, size in enumerate(sizes):
        covered = [i for c in chunks if c.group == group for i in range(c.start, c.stop)]
        assert covered == list(range(size))
        lengths = {c.stop - c.start for c in chunks if c.group == group}
        assert not lengths or max(lengths) - min(lengths) <= 1
    if bucket_cap_mb is None:
        assert len(chunks) == 3
    else:
        assert max(c.stop - c.start for c in chunks) * 4 <= bucket_cap_mb * 1e6


def test_smaller_items_make_longer_chunks():
    assert len(split_into_buckets((1000,), 0.001, item_bytes=4)) == 2 * len(
        split_into_buckets((1000,), 0.001, item_bytes=2)
    )


@pytest.mark.parametrize(("size", "item_bytes"), [(10**7, 4), (123_456_789, 32), (10**11, 4)])
def test_more_buckets_than_a_compiler_can_take_are_refused_with_a_size_that_works(size, item_bytes):
    with pytest.raises(ConfigError, match=r"bucket_cap_mb=0.0002 splits .*: use [0-9.]+ or more, or null") as refusal:
        split_into_buckets((100, size), 0.0002, item_bytes)
    least = float(str(refusal.value).split(": use ")[1].split()[0])
    assert MAX_BUCKETS / 2 < len(split_into_buckets((size,), least, item_bytes)) <= MAX_BUCKETS


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_reducing_after_the_backward_pass_is_never_better(kinds, policy, degree):
    """FlowMoE, theorem 1: between exchanges a reduction delays them by its time at most, and is gone at the end."""
    for weight_grad in ("inline", "greedy"):
        for seed in range(3):
            end = random_step(seed, policy, degree, kinds, weight_grad, "end").makespan_s
            for grad_reduce, chunks in (("block", 1), ("bucketed", 1), ("bucketed", 5)):
                step = random_step(seed, policy, degree, kinds, weight_grad, grad_reduce, chunks).makespan_s
                assert step <= end * (1 + 1e-9)


@pytest.mark.parametrize(("policy", "degree"), POLICIES)
def test_halving_chunks_never_lengthens_the_step_if_starting_one_is_free(policy, degree):
    """FlowMoE, theorem 2."""
    for seed in range(8):
        steps = [
            random_step(seed, policy, degree, ("moe",) * 3, "inline", "bucketed", chunks).makespan_s
            for chunks in (1, 2, 4, 8, 16, 32)
        ]
        assert all(smaller <= larger * (1 + 1e-9) for larger, smaller in pairwise(steps))


@pytest.mark.parametrize("seed", range(6))
def test_with_a_start_up_time_the_step_over_the_chunk_size_has_one_valley(seed):
    """To 1 %: whole chunks make it uneven. The tuner's model of it relies on this."""
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    costs = {"chunk_alpha_s": 0.02, "reduce_scale": 2.0}
    steps = [random_step(seed, "unified", 2, ("moe",) * 6, "inline", "bucketed", n, **costs).makespan_s for n in counts]
    best = steps.index(min(steps))
    assert all(later <= earlier * 1.01 for earlier, later in combinations(steps[: best + 1], 2))
    assert all(later >= earlier * 0.99 for earlier, later in combinations(steps[best:], 2))
    assert steps[-1] > 1.03 * min(steps), "many start-ups must cost"


def test_the_best_chunk_size_is_interior():
    costs = {"chunk_alpha_s": 0.02, "reduce_scale": 2.0}
    one, few, many = (
        random_step(0, "unified", 2, ("moe",) * 6, "inline", "bucketed", n, **costs).makespan_s for n in (1, 6, 96)
    )
    assert few < 0.95 * one
    assert few < 0.95 * many


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize("stream_of", [two_streams, three_streams])
def test_the_listed_order_is_what_exchanges_first_would_choose(kinds, stream_of):
    """The order written down for a cost model is the one that streams with priorities would take by themselves."""
    reductions = (4,) * (len(kinds) + 2)
    shape = make_shape("unified", kinds, 2, grad_reduce="bucketed", reductions=reductions, sharded_experts=True)
    for seed in range(4):
        seconds = random_costs(seed, shape).of(shape)
        schedule = make_schedule("unified", shape, seconds, stream_of)
        check(schedule)
        listed = simulate(schedule, seconds, stream_of)
        assert set(listed.tasks) == set(simulate(schedule, seconds, stream_of, rank_of=exchanges_first).tasks)
