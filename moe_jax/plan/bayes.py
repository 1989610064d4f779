"""Bayesian optimisation of one positive number, e.g. the size of a reduction's chunks (FlowMoE, section 4.3).

A Gaussian process with a Matérn kernel over the number's logarithm says where the time of a step is expected and how
sure that is; the next sample is where the expected improvement is largest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.stats import norm

_XI = 0.1  # standard deviations by which an improvement has to be better: the more, the more is explored
_LENGTHS = np.geomspace(0.1, 1.0, 8)  # of the kernel, as shares of the range
_NOISES = (1e-4, 1e-3, 1e-2, 1e-1)  # variances, as shares of that of all samples
_FIRST = (0.5, 0.15, 0.85)  # samples before the process says anything, as shares of the range

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Search:
    """The least of a function of one of `choices`, which grow; samples are few and noisy. Raises ValueError if none."""

    choices: Sequence[float]
    xs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.choices or min(self.choices) <= 0 or list(self.choices) != sorted(set(self.choices)):
            raise ValueError("a search wants growing choices above 0")
        logs = np.log(np.asarray(self.choices, dtype=np.float64))
        self._places: Array = (logs - logs[0]) / max(logs[-1] - logs[0], 1e-12)

    def observe(self, x: float, seconds: float) -> None:
        """Note what a choice took."""
        self.xs.append(x)
        self.seconds.append(seconds)

    def suggest(self) -> float:
        """What to try next."""
        if len(self.xs) < min(len(_FIRST), len(self.choices)):
            wanted = _FIRST[len(self.xs)]
            untried = [i for i, x in enumerate(self.choices) if x not in self.xs]
            return self.choices[min(untried, key=lambda i: abs(float(self._places[i]) - wanted))]
        mean, deviation = self._expected()
        better = float(mean[self._tried()].min()) - _XI - mean
        improvement = better * norm.cdf(better / deviation) + deviation * norm.pdf(better / deviation)
        return self.choices[int(np.argmax(improvement))]

    @property
    def best(self) -> float:
        """The choice that is expected to take least, of those tried."""
        if len(self.xs) < len(_FIRST):
            return self.xs[int(np.argmin(self.seconds))]
        tried = self._tried()
        return self.choices[tried[int(np.argmin(self._expected()[0][tried]))]]

    def _tried(self) -> list[int]:
        return sorted({list(self.choices).index(x) for x in self.xs})

    def _expected(self) -> tuple[Array, Array]:
        """Mean and standard deviation at every choice, of times of mean 0 and variance 1."""
        x: Array = self._places[[list(self.choices).index(each) for each in self.xs]]
        y = np.asarray(self.seconds, dtype=np.float64)
        y = (y - y.mean()) / max(float(y.std()), 1e-12)
        fits = ((length, noise) for length in _LENGTHS for noise in _NOISES)
        length, noise = max(fits, key=lambda fit: _likelihood(x, y, *fit))
        factor = cho_factor(_matern(x, x, length) + noise * np.eye(len(x)))
        across = _matern(self._places, x, length)
        mean: Array = across @ cho_solve(factor, y)
        variance = 1 - np.einsum("ij,ji->i", across, cho_solve(factor, across.T))
        return mean, np.sqrt(np.maximum(variance, 1e-12))


def _matern(a: Array, b: Array, length: float) -> Array:
    """With smoothness 5/2: twice differentiable."""
    scaled = math.sqrt(5) * np.abs(a[:, None] - b[None, :]) / length
    result: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return result


def _likelihood(x: Array, y: Array, length: float, noise: float) -> float:
    """Logarithm, but for what is the same for all."""
    factor = cho_factor(_matern(x, x, length) + noise * np.eye(len(x)))
    return float(-0.5 * y @ cho_solve(factor, y) - np.log(np.diag(factor[0])).sum())
