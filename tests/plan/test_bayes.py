"""The search: near the best choice in eight samples, more often than a grid or chance."""

import numpy as np
import pytest

from moe_jax.plan.bayes import Search

CHOICES = [float(x) for x in np.geomspace(0.25, 256, 61)]
SAMPLES = 8


def step_seconds(x: float, per_chunk: float, per_mb: float) -> float:
    """Small chunks start often, large ones hold up exchanges: a valley with one floor."""
    return 1 + per_chunk / x + per_mb * x


def searched(valley: tuple[float, float], noise: float, draw: np.random.Generator) -> float:
    search = Search(CHOICES)
    for _ in range(SAMPLES):
        x = search.suggest()
        search.observe(x, step_seconds(x, *valley) * (1 + noise * draw.standard_normal()))
    return search.best


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


def test_few_choices_are_all_tried() -> None:
    search = Search([1.0, 2.0])
    for _ in range(2):
        x = search.suggest()
        search.observe(x, x)
    assert sorted(search.xs) == [1.0, 2.0]
    assert search.best == 1.0


@pytest.mark.parametrize("choices", [[], [2.0, 1.0], [0.0, 1.0]])
def test_choices_must_grow(choices: list[float]) -> None:
    with pytest.raises(ValueError, match="growing choices above 0"):
        Search(choices)
