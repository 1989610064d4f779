"""Which choice of settings a run trains with, decided by how long its steps take (FlowMoE, section 4.3).

A search tries some of the choices and keeps the fastest, until its steps no longer take as long as they did.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

from moe_jax.plan.bayes import BayesSearch, Choice


@final
class Tuner:
    """Fed with the seconds of a step, it says what to use next. Choices are told by their numbers.

    `best_s` is what a step took with the `start` found by an earlier search, if there was one.
    """

    def __init__(
        self, choices: Sequence[Choice], *, samples: int, band: float, start: int, best_s: float | None = None
    ) -> None:
        self._choices, self._samples, self._band = choices, samples, band
        self._dropped: list[int] = []
        self._search: BayesSearch | None = self._new_search() if best_s is None else None
        self.in_use = start
        self.best_s = best_s
        self.sample = 0  # samples taken, of the search under way or the last one

    @property
    def searching(self) -> bool:
        """Or else satisfied, and only watching."""
        return self._search is not None

    def observe(self, seconds: float) -> int:
        """Note the seconds of a step with the choice in use; returns what to use from now on."""
        if self._search is None:
            assert self.best_s is not None
            if abs(seconds - self.best_s) <= self._band * self.best_s:
                return self.in_use
            self._search, self.best_s, self.sample = self._new_search(), None, 0
        self._search.observe(self.in_use, seconds)
        self.sample += 1
        return self._next(self._search)

    def drop(self) -> int:
        """The choice in use does not work; returns what to use instead, now and in later searches."""
        assert self._search is not None
        self._dropped.append(self.in_use)
        self._search.drop(self.in_use)
        self.sample += 1
        return self._next(self._search)

    @property
    def under_way(self) -> dict[str, Any] | None:
        """The search under way as plain values; None without one."""
        if self._search is None:
            return None
        samples = {"tried": [*self._search.tried], "seconds": [*self._search.seconds], "sample": self.sample}
        return samples | {"dropped": [*self._dropped], "in_use": self.in_use}

    def go_on(self, under_way: Mapping[str, Any]) -> None:
        """Take up what another tuner of the same choices, with a search, had `under_way`."""
        assert self._search is not None
        self._dropped = [*under_way["dropped"]]
        self._search = self._new_search()
        for choice, seconds in zip(under_way["tried"], under_way["seconds"], strict=True):
            self._search.observe(choice, seconds)
        self.in_use, self.sample = under_way["in_use"], under_way["sample"]

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
