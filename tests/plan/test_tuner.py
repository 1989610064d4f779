"""The tuner: its decisions from the seconds that it is given, its search, and the file of what runs found.

The search comes near the best choice in eight samples, more often than a grid or chance.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from moe_jax.errors import ConfigError
from moe_jax.plan.tuner import BayesSearch, Choice, Tuned, Tuner, read_tuned, write_tuned

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


def test_what_was_best_at_an_earlier_start_may_not_work_at_this_one() -> None:
    found = tuner(samples=3)
    found.resume({"tried": [1, 3], "seconds": [1.0, 0.1], "sample": 2, "dropped": [], "in_use": 0})
    assert found.observe(5.0) == 3
    assert not found.searching
    assert found.drop() != 3
    assert found.searching


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


def test_a_search_resumes_where_another_one_was() -> None:
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


SIZES = [float(x) for x in np.geomspace(0.25, 256, 61)]


def step_seconds(x: float, per_chunk: float, per_mb: float) -> float:
    """Small chunks start often, large ones hold up exchanges: a valley with one floor."""
    return 1 + per_chunk / x + per_mb * x


def searched(valley: tuple[float, float], noise: float, draw: np.random.Generator) -> float:
    search = BayesSearch([(x,) for x in SIZES])
    for _ in range(SAMPLES):
        choice = search.suggest()
        search.observe(choice, step_seconds(SIZES[choice], *valley) * (1 + noise * draw.standard_normal()))
    return SIZES[search.best]


def excess(x: float, valley: tuple[float, float]) -> float:
    """Over the best choice of all."""
    return step_seconds(x, *valley) / min(step_seconds(each, *valley) for each in SIZES) - 1


def valleys(count: int) -> list[tuple[float, float]]:
    draw = np.random.default_rng(0)
    return [(float(10 ** draw.uniform(-1.5, 0.5)), float(10 ** draw.uniform(-3, -1))) for _ in range(count)]


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_eight_samples_come_within_two_percent_of_the_best(noise: float) -> None:
    draw = np.random.default_rng(1)
    found = [excess(searched(valley, noise, draw), valley) for valley in valleys(20)]
    assert np.mean(np.asarray(found) <= 0.02) >= 0.9, found


def test_it_beats_a_grid_and_chance_with_as_many_samples() -> None:
    draw = np.random.default_rng(2)
    grid = SIZES[:: len(SIZES) // SAMPLES][:SAMPLES]
    own, even, random = [], [], []
    for valley in valleys(20):
        own.append(excess(searched(valley, 0.0, draw), valley))
        even.append(min(excess(x, valley) for x in grid))
        random.append(min(excess(float(x), valley) for x in draw.choice(SIZES, SAMPLES, replace=False)))
    assert np.mean(own) < np.mean(even)
    assert np.mean(own) < np.mean(random)


SEVERAL: list[Choice] = [(x, r, name) for x in SIZES[::4] for r in (1, 2, 4, 8) for name in ("flat", "ring", "halo")]


def several_seconds(x: float, degree: float, name: str) -> float:
    """A degree of 4 is best, and one of the algorithms."""
    return step_seconds(x, 0.3, 0.01) + 0.2 * abs(np.log2(degree) - 2) + {"flat": 0.3, "ring": 0.0, "halo": 0.5}[name]


def test_several_settings_are_searched_together_better_than_by_chance() -> None:
    """Sixteen samples of 192 choices."""
    least = min(several_seconds(*choice) for choice in SEVERAL)
    search = BayesSearch(SEVERAL)
    for _ in range(16):
        choice = search.suggest()
        search.observe(choice, several_seconds(*SEVERAL[choice]))
    own = several_seconds(*SEVERAL[search.best]) / least - 1
    draw = np.random.default_rng(3)
    chance = [min(several_seconds(*SEVERAL[i]) for i in draw.permutation(len(SEVERAL))[:16]) for _ in range(200)]
    assert own < 0.05
    assert own < np.mean(chance) / least - 1


def test_first_samples_lie_apart_from_where_a_run_began() -> None:
    search, places = BayesSearch([(x,) for x in SIZES]), []
    search.observe(len(SIZES) - 1, 1.0)
    for _ in range(2):
        places.append(search.suggest() / len(SIZES))
        search.observe(search.suggest(), 1.0)
    assert places == pytest.approx([0.15, 0.5], abs=0.02)


def test_few_choices_are_all_tried() -> None:
    search = BayesSearch([(1.0,), (2.0,)])
    for _ in range(2):
        choice = search.suggest()
        search.observe(choice, choice)
    assert sorted(search.tried) == [0, 1]
    assert search.best == 0


def test_what_does_not_work_is_not_suggested_again() -> None:
    search, valley = BayesSearch([(x,) for x in SIZES]), valleys(1)[0]
    dropped = set()
    for i in range(SAMPLES):
        choice = search.suggest()
        assert choice not in dropped
        if i % 2:
            dropped.add(choice)
            search.drop(choice)
        else:
            search.observe(choice, step_seconds(SIZES[choice], *valley))
    assert search.best not in dropped


@pytest.mark.parametrize("choices", [[], [(1.0,), (1.0,)], [(0.0,), (1.0,)]])
def test_choices_differ_and_lie_above_zero(choices: list[Choice]) -> None:
    with pytest.raises(ValueError, match="different choices, with numbers above 0"):
        BayesSearch(choices)


HERE = {"model": {"hidden_size": 16, "schedule": ((10, 1.5),)}, "mesh": {"data": 2}}  # tuples are lists in a file
THERE = {"model": {"hidden_size": 16}, "mesh": {"data": 4}}


def test_what_was_found_is_found_again_for_the_same_alone(tmp_path: Path) -> None:
    file = tmp_path / "shared" / "tuned.json"
    assert read_tuned(file, HERE) is None
    for of, bucket_cap_mb in ((HERE, 1.0), (THERE, 2.0), (HERE, 3.0)):
        write_tuned(file, of, Tuned({"bucket_cap_mb": bucket_cap_mb, "algorithm": "ring"}, 0.25))
    assert read_tuned(file, HERE) == Tuned({"bucket_cap_mb": 3.0, "algorithm": "ring"}, 0.25)
    assert read_tuned(file, THERE) == Tuned({"bucket_cap_mb": 2.0, "algorithm": "ring"}, 0.25)
    assert read_tuned(file, {"model": {}}) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read (it is no JSON)"),
        ("{}", "is no list of settings with step times"),
        ('[{"of": {}, "settings": {}}]', "is no list of settings with step times"),
        ('[{"of": {}, "settings": {}, "step_s": -1.0}]', "is no list of settings with step times"),
    ],
)
def test_a_damaged_file_is_named(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}, {reason}: remove it, or set tune.cache")):
        read_tuned(file, HERE)
