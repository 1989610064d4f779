"""When steps finish on the devices, heard by a thread that does nothing else.

The thread that trains hears of it late: it reads batches, writes records, and computes in Python meanwhile.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from moe_jax.telemetry.energy import Joules


class Spent(NamedTuple):
    """Up to a moment."""

    time_s: float
    energy_j: float

    def without(self, start: "Spent", end: "Spent") -> "Spent":
        """A beginning moved by what lies between two moments, so that it does not count."""
        return Spent(self.time_s + end.time_s - start.time_s, self.energy_j + end.energy_j - start.energy_j)


class Clock:
    """Says what is spent up to now. Energy is not counted any more once that has failed."""

    def __init__(self, joules: Joules | None, warn: Callable[[str], None]) -> None:
        self._joules, self._warn = joules, warn

    @property
    def counts_energy(self) -> bool:
        return self._joules is not None

    def __call__(self) -> Spent:
        energy_j = 0.0
        if self._joules is not None:
            try:
                energy_j = self._joules()
            except Exception as error:  # a driver that is loaded again, say
                self._joules = None
                self._warn(f"energy is not counted any more ({type(error).__name__}: {error})")
        return Spent(time.perf_counter(), energy_j)


class Finish:
    """Of one step."""

    def __init__(self, arrays: Any, given: Spent) -> None:
        self.arrays, self.given = arrays, given
        self._heard = threading.Event()
        self._at = given
        self._is_late = False

    def hear(self, now: Clock, last: Spent) -> Spent:
        """Wait for the arrays, and remember when they were there."""
        self._is_late = self.given.time_s < last.time_s and all(_is_ready(x) for x in jax.tree.leaves(self.arrays))
        try:
            with suppress(Exception):  # raised where the step is waited for
                jax.block_until_ready(self.arrays)
            self._at = now()
        finally:
            self._heard.set()
        return self._at

    def wait(self) -> tuple[Spent, bool]:
        """When it was, and whether the step was done when its predecessor was heard of, though started before.

        If so, both were heard of late, and nobody knows by how much. Raises the step's error.
        """
        self._heard.wait()  # Python's signal handlers are called meanwhile
        jax.block_until_ready(self.arrays)
        return self._at, self._is_late


class Finishes:
    """Of the steps of a run, in their order."""

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._given: queue.SimpleQueue[Finish | None] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=[self._given, now], daemon=True).start()
        weakref.finalize(self, self._given.put, None)

    def of(self, arrays: Any) -> Finish:
        """Of a step just started, by what it returns."""
        finish = Finish(arrays, self._now())
        self._given.put(finish)
        return finish


def _listen(given: "queue.SimpleQueue[Finish | None]", now: Clock) -> None:
    last = now()
    while (finish := given.get()) is not None:
        with suppress(Exception):  # of a warning that finds no terminal
            last = finish.hear(now, last)


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_ready()
