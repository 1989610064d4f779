"""The search: near the best choice in eight samples, more often than a grid or chance."""

import numpy as np
import pytest

from moe_jax.plan.tuner import BayesSearch, Choice

CHOICES = [float(x) for x in np.geomspace(0.25, 256, 61)]
SAMPLES = 8


def step_seconds(x: float, per_chunk: float, per_mb: float) -> float:
    """Small chunks start often, large ones hold up exchanges: a valley with one floor."""
    return 1 + per_chunk / x + per_mb * x


def searched(valley: tuple[float, float], noise: float, draw: np.random.Generator) -> float:
    search = BayesSearch([(x,) for x in CHOICES])
    for _ in range(SAMPLES):
        choice = search.suggest()
        search.observe(choice, step_seconds(CHOICES[choice], *valley) * (1 + noise * draw.standard_normal()))
    return CHOICES[search.best]


def excess(x: float, valley: tuple[float, float]) -> float:
    """Over the best choice of all."""
    return step_seconds(x, *valley) / min(step_seconds(each, *valley) for each in CHOICES) - 1


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
    grid = CHOICES[:: len(CHOICES) // SAMPLES][:SAMPLES]
    own, even, random = [], [], []
    for valley in valleys(20):
        own.append(excess(searched(valley, 0.0, draw), valley))
        even.append(min(excess(x, valley) for x in grid))
        random.append(min(excess(float(x), valley) for x in draw.choice(CHOICES, SAMPLES, replace=False)))
    assert np.mean(own) < np.mean(even)
    assert np.mean(own) < np.mean(random)


SEVERAL: list[Choice] = [(x, r, name) for x in CHOICES[::4] for r in (1, 2, 4, 8) for name in ("flat", "ring", "halo")]


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
    search, places = BayesSearch([(x,) for x in CHOICES]), []
    search.observe(len(CHOICES) - 1, 1.0)
    for _ in range(2):
        places.append(search.suggest() / len(CHOICES))
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
    search, valley = BayesSearch([(x,) for x in CHOICES]), valleys(1)[0]
    dropped = set()
    for i in range(SAMPLES):
        choice = search.suggest()
        assert choice not in dropped
        if i % 2:
            dropped.add(choice)
            search.drop(choice)
        else:
            search.observe(choice, step_seconds(CHOICES[choice], *valley))
    assert search.best not in dropped


@pytest.mark.parametrize("choices", [[], [(1.0,), (1.0,)], [(0.0,), (1.0,)]])
def test_choices_differ_and_lie_above_zero(choices: list[Choice]) -> None:
    with pytest.raises(ValueError, match="different choices, with numbers above 0"):
        BayesSearch(choices)
