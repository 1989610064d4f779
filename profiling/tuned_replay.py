"""Search methods for the fastest choice, replayed on times that were measured before."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_jax.plan.tuner import BayesSearch

Array = NDArray[np.float64]
Draw = np.random.Generator

WITHIN = 0.02  # relative to the fastest
SAMPLES = 8


def regrets(sizes: Sequence[float], step_s: Array, seeds: int) -> dict[str, dict[str, Any]]:
    """Return by how much the choice of each method is slower than the fastest size, after each sample.

    `step_s` has seconds [size, round]. A sample is the time of one round of a size. The true time of a size is its
    median. The first size of a search is drawn at random.
    """
    true_s = np.median(step_s, axis=1)
    found: dict[str, dict[str, Any]] = {}
    for name, method in _METHODS.items():
        chosen = np.array([method(sizes, step_s, np.random.default_rng(seed)) for seed in range(seeds)])
        excess = true_s[chosen] / true_s.min() - 1
        found[name] = {
            "mean": excess.mean(axis=0).round(5).tolist(),
            "ninth_decile": np.quantile(excess, 0.9, axis=0).round(5).tolist(),
            "within_2_percent": (excess <= WITHIN).mean(axis=0).round(4).tolist(),
        }
    return found


def _search(sizes: Sequence[float], step_s: Array, draw: Draw) -> list[int]:
    search, chosen = BayesSearch([(size,) for size in sizes]), []
    size = int(draw.integers(len(sizes)))
    for _ in range(SAMPLES):
        search.observe(size, float(draw.choice(step_s[size])))
        chosen.append(search.best)
        size = search.suggest()
    return chosen


def _grid(sizes: Sequence[float], step_s: Array, draw: Draw) -> list[int]:
    even = np.linspace(0, len(sizes) - 1, SAMPLES).round().astype(int)
    return _least_so_far(draw.permutation(even), step_s, draw)


def _random(sizes: Sequence[float], step_s: Array, draw: Draw) -> list[int]:
    return _least_so_far(draw.permutation(len(sizes))[:SAMPLES], step_s, draw)


def _least_so_far(order: NDArray[np.int64], step_s: Array, draw: Draw) -> list[int]:
    seconds = [float(draw.choice(step_s[size])) for size in order]
    return [int(order[int(np.argmin(seconds[: n + 1]))]) for n in range(len(order))]


_METHODS: dict[str, Callable[[Sequence[float], Array, Draw], list[int]]] = {
    "search": _search,
    "grid": _grid,
    "random": _random,
}
