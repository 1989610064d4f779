"""Decisions of the tuner, from the seconds that it is told."""

import json

import pytest

from moe_jax.plan.tuner import Choice, Tuner

CHOICES: list[Choice] = [(2.0**i,) for i in range(-3, 8)]
SAMPLES = 8


def seconds_of(choice: int, best: int) -> float:
    return 1 + 0.05 * abs(choice - best)


def tuner(**changes: object) -> Tuner:
    return Tuner(CHOICES, **{"samples": SAMPLES, "band": 0.2, "start": 10} | changes)  # type: ignore[arg-type]


def settled(best: int) -> Tuner:
    found = tuner()
    while found.searching:
        found.observe(seconds_of(found.in_use, best))
    return found


def test_a_search_begins_with_what_is_in_use_and_ends_with_the_fastest() -> None:
    found, tried = tuner(), []
    while found.searching:
        tried.append(found.in_use)
        assert found.best_s is None
        found.observe(seconds_of(found.in_use, best=4))
    assert tried[0] == 10
    assert len(tried) == found.sample == SAMPLES
    assert found.in_use == 4
    assert found.best_s == 1.0


@pytest.mark.parametrize(("factor", "again"), [(1.19, False), (0.81, False), (1.21, True), (0.79, True)])
def test_it_searches_again_when_steps_leave_the_band(factor: float, again: bool) -> None:
    found = settled(best=4)
    found.observe(factor)
    assert found.searching == again
    assert found.sample == (1 if again else SAMPLES), "what is in use has been measured"


def test_a_search_under_other_conditions_finds_another_choice() -> None:
    found = settled(best=2)
    assert found.in_use == 2
    found.observe(2 * seconds_of(2, best=8))
    while found.searching:
        found.observe(2 * seconds_of(found.in_use, best=8))
    assert found.in_use == 8
    assert found.best_s == 2.0


def test_what_was_found_before_is_used_and_watched() -> None:
    found = tuner(start=3, best_s=1.0)
    assert not found.searching
    assert found.observe(1.1) == 3
    assert not found.searching
    assert found.observe(1.3) != 3
    assert found.searching


def test_a_choice_that_does_not_work_costs_a_sample() -> None:
    found, dropped = tuner(), []
    while found.searching:
        if found.in_use < 5:
            dropped.append(found.in_use)
            found.drop()
        else:
            found.observe(seconds_of(found.in_use, best=4))
    assert found.sample == SAMPLES
    assert len(set(dropped)) == len(dropped) > 0
    assert found.in_use == 5


def test_all_that_is_left_may_not_work() -> None:
    found = tuner(samples=2)
    found.observe(1.0)
    assert found.drop() == 10
    assert found.best_s == 1.0


def test_what_does_not_work_is_never_tried_again() -> None:
    found = tuner()
    found.observe(1.0)
    broken = found.in_use
    assert found.drop() != broken
    tried = []
    for pace in (1, 2):  # tune, leave the band, tune again
        found.observe(pace * seconds_of(found.in_use, broken))
        while found.searching:
            tried.append(found.in_use)
            found.observe(pace * seconds_of(found.in_use, broken))
    assert len(tried) > SAMPLES
    assert broken not in tried


def test_a_search_goes_on_where_another_one_was() -> None:
    one, other = tuner(), tuner()
    for _ in range(3):
        one.observe(seconds_of(one.in_use, best=4))
    one.drop()
    assert one.search_state is not None
    other.resume(json.loads(json.dumps(one.search_state)))
    while one.searching:
        assert (other.in_use, other.sample) == (one.in_use, one.sample)
        seconds = seconds_of(one.in_use, best=4)
        assert other.observe(seconds) == one.observe(seconds)
    assert (other.searching, other.best_s) == (False, one.best_s)
    assert one.search_state is other.search_state is None
