"""Online tuning: choose settings during a run by how long its steps take (FlowMoE, section 4.3).

A search tries some of the choices and keeps the fastest, until its steps no longer take as long as they did.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

from moe_jax.plan.bayes import BayesSearch, Choice


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
        assert self._search is not None
        self._dropped.append(self.in_use)
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
