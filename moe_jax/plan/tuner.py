"""Online tuning: choose settings during a run by how long its steps take (FlowMoE, section 4.3).

A search tries some of the choices and keeps the fastest, until its steps no longer take as long as they did. It is
Bayesian: a Gaussian process with a Matérn kernel predicts the mean and the uncertainty of the step time; the next
sample has the largest expected improvement. The distance of two numbers is that of their logarithms, and names are
either equal or not. The length scale of each setting is fitted.

The fastest settings are kept in a JSON file with one entry per tuned config:

[{"of": {"model": {…}, "mesh": {…}, …}, "settings": {"bucket_cap_mb": 2.1}, "step_s": 0.31}, …]

S settings, n choices, m samples, F fits.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from moe_jax.errors import ConfigError
from moe_jax.files.atomic import write_atomically
from moe_jax.files.untrusted import read_named_json


class Tuned(NamedTuple):
    """The fastest settings, and their step time."""

    settings: dict[str, float | str]
    step_s: float


def read_tuned(path: Path, of: Mapping[str, Any]) -> Tuned | None:
    """The entry for the same plain values `of`, if there is one. Raises ConfigError."""
    entries, same = _entries(path), _as_read(of)
    return next((Tuned(each["settings"], each["step_s"]) for each in entries if each["of"] == same), None)


def write_tuned(path: Path, of: Mapping[str, Any], tuned: Tuned) -> None:
    """Add an entry to the file, replacing one for the same values. Raises ConfigError or OSError."""
    others = [each for each in _entries(path) if each["of"] != _as_read(of)]
    write_atomically(path, json.dumps([*others, {"of": of} | tuned._asdict()], indent=1) + "\n", is_shared=True)


def _as_read(of: Mapping[str, Any]) -> Any:
    """The same values as JSON returns them: tuples become lists."""
    return json.loads(json.dumps(of))


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    name = f"what was tuned before, {path},"
    entries = read_named_json(path, name, "remove it, or set tune.cache to another file", ConfigError)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ConfigError(
            f"{name} is no list of settings with step times: remove it, or set tune.cache to another file"
        )
    return entries


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"of", *Tuned._fields}
        and isinstance(entry["settings"], dict)
        and all(isinstance(value, str | int | float) for value in entry["settings"].values())
        and isinstance(entry["step_s"], float)
        and entry["step_s"] > 0
    )


_XI = 0.1  # standard deviations that an improvement must exceed; larger values explore more
_LENGTHS = np.geomspace(0.1, 1.0, 8)  # length scales of the kernel, as shares of a setting's range
_NOISES = np.array([1e-4, 1e-3, 1e-2, 1e-1])  # variances of the noise, as shares of the variance of all samples
_FIRST = (0.5, 0.15, 0.85)  # the first samples, before the process is fitted, as shares of the range

Choice = tuple[float | str, ...]  # a value of each setting
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class BayesSearch:
    """A search for the fastest of `choices`, from few and noisy samples. A choice is identified by its index.

    Raises ValueError for duplicate choices, no choices, or numbers that are not above 0.
    """

    choices: Sequence[Choice]
    tried: list[int] = field(default_factory=list)  # the choice of each sample
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = [value for choice in self.choices for value in choice if not isinstance(value, str)]
        if not self.choices or len(set(self.choices)) < len(self.choices) or min(numbers, default=1) <= 0:
            raise ValueError("a search wants different choices, with numbers above 0")
        columns = list(zip(*self.choices, strict=True))
        self._place_Sn: Array = np.stack([_places(column) for column in columns])
        distance_Snn = np.abs(self._place_Sn[:, :, None] - self._place_Sn[:, None, :])
        is_name_S = np.array([isinstance(column[0], str) for column in columns])
        self._distance_Snn: Array = np.where(is_name_S[:, None, None], distance_Snn > 0, distance_Snn)
        self._possible = [True] * len(self.choices)

    def observe(self, choice: int, seconds: float) -> None:
        """Record the seconds of a step with a choice."""
        self.tried.append(choice)
        self.seconds.append(seconds)

    def drop(self, choice: int) -> None:
        """Exclude a choice that does not work."""
        self._possible[choice] = False

    def suggest(self) -> int:
        """The choice to try next."""
        if len(self.tried) < min(len(_FIRST), sum(self._possible)):
            return self._apart()
        mean, deviation = self._expected()
        better = float(mean[self.tried].min()) - _XI - mean
        z = better / deviation
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)  # importing scipy would take a fifth of a second
        share_below = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in z])
        improvement = better * share_below + deviation * density
        return int(np.argmax(np.where(self._possible, improvement, -np.inf)))

    @property
    def best(self) -> int:
        """The choice with the lowest expected time among those tried."""
        if len(self.tried) < len(_FIRST):
            return self.tried[int(np.argmin(self.seconds))]
        tried = sorted(set(self.tried))
        return tried[int(np.argmin(self._expected()[0][tried]))]

    def _apart(self) -> int:
        """One of the first samples: spread over the ranges, the farthest from all choices tried."""
        free = [i for i, possible in enumerate(self._possible) if possible and i not in self.tried]
        settings = range(len(self._place_Sn))
        wanted = [np.array([_FIRST[(i + s) % len(_FIRST)] for s in settings]) for i in range(len(_FIRST))]
        nearest = [min(free, key=lambda i: float(np.abs(self._place_Sn[:, i] - place_S).sum())) for place_S in wanted]
        return max(nearest, key=lambda i: float(self._distance_Snn[:, i, self.tried].sum(0).min(initial=math.inf)))

    def _expected(self) -> tuple[Array, Array]:
        """Mean and standard deviation of each choice's time, with times scaled to mean 0 and variance 1."""
        y_m = np.asarray(self.seconds, dtype=np.float64)
        y_m = (y_m - y_m.mean()) / max(float(y_m.std()), 1e-12)
        across_Snm = self._distance_Snn[:, :, self.tried]
        length_S, noise = _fit(across_Snm[:, self.tried], y_m)
        across_nm = _matern(across_Snm, length_S)
        covariance_mm = across_nm[self.tried] + noise * np.eye(len(y_m))
        mean_n: Array = across_nm @ np.linalg.solve(covariance_mm, y_m)
        variance_n = 1 - np.einsum("nm,mn->n", across_nm, np.linalg.solve(covariance_mm, across_nm.T))
        return mean_n, np.sqrt(np.maximum(variance_n, 1e-12))


def _places(column: Sequence[float | str]) -> Array:
    """The values of a setting as shares of its range."""
    names = sorted(set(map(str, column)))
    raw = np.array([names.index(value) if isinstance(value, str) else math.log(value) for value in column], np.float64)
    result: Array = (raw - raw.min()) / max(float(np.ptp(raw)), 1e-12)
    return result


def _matern(distance: Array, length_S: Array) -> Array:
    """The Matérn kernel with smoothness 5/2, which is twice differentiable; `distance` [S, …]."""
    lengths = length_S.reshape(-1, *[1] * (distance.ndim - 1))
    scaled = math.sqrt(5) * np.sqrt(((distance / lengths) ** 2).sum(axis=0))
    result: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return result


def _fit(distance_Smm: Array, y_m: Array) -> tuple[Array, float]:
    """The length scales [S] and the noise that maximise the likelihood of the samples."""
    length_FS = np.array(list(itertools.product(_LENGTHS, repeat=len(distance_Smm))))
    kernel = np.stack([_matern(distance_Smm, length_S) for length_S in length_FS])
    covariance = kernel[:, None] + _NOISES[:, None, None] * np.eye(len(y_m))
    likelihood = -np.linalg.solve(covariance, y_m[:, None])[..., 0] @ y_m - np.linalg.slogdet(covariance)[1]
    fit, noise = np.unravel_index(int(np.argmax(likelihood)), likelihood.shape)
    return length_FS[fit], float(_NOISES[noise])


@final
class Tuner:
    """Takes the seconds of each step and returns the choice to use next. A choice is identified by its index.

    `best_s` is the step time with `start`, if an earlier search found it.
    """

    def __init__(
        self, choices: Sequence[Choice], *, samples: int, band: float, start: int, best_s: float | None = None
    ) -> None:
        self._choices, self._samples, self._band = choices, samples, band
        self._dropped: list[int] = []
        self._search: BayesSearch | None = self._new_search() if best_s is None else None
        self.in_use = start
        self.best_s = best_s
        self.sample = 0  # samples taken in the current or the last search

    @property
    def searching(self) -> bool:
        """Whether a search is running; otherwise steps are only monitored."""
        return self._search is not None

    def observe(self, seconds: float) -> int:
        """Record the seconds of a step with the choice in use. Returns the choice to use from now on."""
        if self._search is None:
            assert self.best_s is not None
            if abs(seconds - self.best_s) <= self._band * self.best_s:
                return self.in_use
            self._search, self.best_s, self.sample = self._new_search(), None, 0
        self._search.observe(self.in_use, seconds)
        self.sample += 1
        return self._next(self._search)

    def drop(self) -> int:
        """Exclude the choice in use, which does not work. Returns the choice to use instead.

        It is excluded from later searches, too.
        """
        self._dropped.append(self.in_use)
        if self._search is None:  # an earlier start found it best, and it does not work here
            self._search, self.best_s, self.sample = self._new_search(), None, 0
        else:
            self._search.drop(self.in_use)
        self.sample += 1
        return self._next(self._search)

    @property
    def search_state(self) -> dict[str, Any] | None:
        """The state of the running search as plain values; None without one."""
        if self._search is None:
            return None
        samples = {"tried": [*self._search.tried], "seconds": [*self._search.seconds], "sample": self.sample}
        return samples | {"dropped": [*self._dropped], "in_use": self.in_use}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue a search from the state of another tuner of the same choices. This tuner must be searching, too."""
        assert self._search is not None
        self._dropped = [*state["dropped"]]
        self._search = self._new_search()
        for choice, seconds in zip(state["tried"], state["seconds"], strict=True):
            self._search.observe(choice, seconds)
        self.in_use, self.sample = state["in_use"], state["sample"]

    def _new_search(self) -> BayesSearch:
        search = BayesSearch(self._choices)
        for choice in self._dropped:
            search.drop(choice)
        return search

    def _next(self, search: BayesSearch) -> int:
        if self.sample < self._samples:
            self.in_use = search.suggest()
        else:
            self.in_use = search.best
            times = [s for choice, s in zip(search.tried, search.seconds, strict=True) if choice == self.in_use]
            self._search, self.best_s = None, sum(times) / len(times)
        return self.in_use
