"""The forms of MoNTA against the paper's formulas and against a walk through the stages."""

import itertools

import pytest

from moe_jax.plan.over_tensor import Stages, fastest_form, form_seconds, stage_seconds
from moe_jax.plan.task_times import Linear

SLOW_EXCHANGE = Stages(Linear(1e-5, 1e-9).seconds, Linear(1e-6, 1e-11).seconds, Linear(1e-6, 1e-12).seconds)
SLOW_GATHER = Stages(Linear(1e-6, 1e-11).seconds, Linear(1e-6, 1e-10).seconds, Linear(1e-6, 1e-11).seconds)
CASES = list(itertools.product([SLOW_EXCHANGE, SLOW_GATHER], [1e6, 1e8], [2, 4], [1, 2, 5]))
EXPERTS = 8


def walked(durations, chunks):
    """When the last chunk leaves the last stage, each stage taking one chunk at a time."""
    free = [0.0] * len(durations)
    for _ in range(chunks):
        done = 0.0
        for stage, seconds in enumerate(durations):
            done = free[stage] = max(done, free[stage]) + seconds
    return free[-1]


@pytest.mark.parametrize(("stages", "num_bytes", "tensor", "chunks"), CASES)
def test_o2_and_o3_are_the_papers_formulas(stages, num_bytes, tensor, chunks):
    exchange, gather, copy = stage_seconds(num_bytes, tensor, EXPERTS, chunks, stages)
    together = gather + copy
    o2 = exchange + chunks * together if exchange < together else chunks * exchange + together
    assert form_seconds("o2", num_bytes, tensor, EXPERTS, chunks, stages) == pytest.approx(o2)
    assert copy <= max(exchange, gather), "the paper's case"
    o3 = exchange + chunks * gather + copy if exchange < gather else chunks * exchange + gather + copy
    assert form_seconds("o3", num_bytes, tensor, EXPERTS, chunks, stages) == pytest.approx(o3)


@pytest.mark.parametrize(("stages", "num_bytes", "tensor", "chunks"), CASES)
def test_o2_and_o3_are_what_a_walk_through_the_stages_takes(stages, num_bytes, tensor, chunks):
    slow_copies = stages._replace(copy=Linear(0, 1e-8).seconds)  # which the paper leaves out
    for each in (stages, slow_copies):
        exchange, gather, copy = stage_seconds(num_bytes, tensor, EXPERTS, chunks, each)
        o2 = form_seconds("o2", num_bytes, tensor, EXPERTS, chunks, each)
        o3 = form_seconds("o3", num_bytes, tensor, EXPERTS, chunks, each)
        assert o2 == pytest.approx(walked([exchange, gather + copy], chunks))
        assert o3 == pytest.approx(walked([exchange, gather, copy], chunks))


def test_o1_exchanges_a_part_of_what_all_ranks_would():
    only_bytes = Stages(lambda x: x, lambda x: 0.0, lambda x: 0.0)
    assert form_seconds("replicated", 800.0, 4, EXPERTS, 1, only_bytes) == 700
    assert form_seconds("o1", 800.0, 4, EXPERTS, 1, only_bytes) == 175


def test_the_choice_is_the_least_of_all_forms_and_chunks():
    for stages, num_bytes, tensor in itertools.product([SLOW_EXCHANGE, SLOW_GATHER], [1e4, 1e6, 1e8], [2, 4]):
        choice = fastest_form(num_bytes, tensor, EXPERTS, stages, smallest_bytes=1e6)
        assert choice.chunks <= max(num_bytes / tensor / 1e6, 1)
        for form, chunks in itertools.product(["replicated", "o1", "o2", "o3"], range(1, choice.chunks + 3)):
            if num_bytes / tensor / chunks >= 1e6 or chunks == 1:
                assert choice.seconds <= form_seconds(form, num_bytes, tensor, EXPERTS, chunks, stages)


def test_chunks_that_gain_next_to_nothing_are_not_made():
    exact = fastest_form(1e8, 4, EXPERTS, SLOW_EXCHANGE, smallest_bytes=1e5)
    easy = fastest_form(1e8, 4, EXPERTS, SLOW_EXCHANGE, smallest_bytes=1e5, tolerance=0.5)
    assert exact.chunks > easy.chunks
    assert easy.form == "o1"
