"""When steps finish on the devices, observed by a thread that does nothing else.

The training thread would observe it late, since it reads batches, writes records and runs Python code in the meantime.
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


class Usage(NamedTuple):
    """Time and energy used up to some moment, since an arbitrary start."""

    time_s: float
    energy_j: float

    def without(self, start: "Usage", end: "Usage") -> "Usage":
        """This moment moved later by the usage from `start` to `end`, so that differences to it exclude this usage."""
        return Usage(self.time_s + end.time_s - start.time_s, self.energy_j + end.energy_j - start.energy_j)


class Clock:
    """Reads the usage up to now. After the first failure to read the energy, it is 0 and not counted any more."""

    def __init__(self, joules: Joules | None, warn: Callable[[str], None]) -> None:
        self._joules, self._warn = joules, warn

    @property
    def counts_energy(self) -> bool:
        return self._joules is not None

    def __call__(self) -> Usage:
        energy_j = 0.0
        if self._joules is not None:
            try:
                energy_j = self._joules()
            except Exception as error:  # for example after the driver was reloaded
                self._joules = None
                self._warn(f"energy is not counted any more ({type(error).__name__}: {error})")
        return Usage(time.perf_counter(), energy_j)


class StepCompletion:
    """The completion of one step, which was started at `started` and returns `arrays`."""

    def __init__(self, arrays: Any, started: Usage) -> None:
        self.arrays, self.started = arrays, started
        self._observed = threading.Event()
        self._at = started
        self._is_late = False

    def observe(self, now: Clock, last: Usage) -> Usage:
        """Wait for the arrays, and note and return when they are ready. `last`: when the preceding step was."""
        self._is_late = self.started.time_s < last.time_s and all(_is_ready(x) for x in jax.tree.leaves(self.arrays))
        try:
            with suppress(Exception):  # `wait` raises it
                jax.block_until_ready(self.arrays)
            self._at = now()
        finally:
            self._observed.set()
        return self._at

    def wait(self) -> tuple[Usage, bool]:
        """Wait for the step; returns when it completed, and whether that was observed late. Raises the step's error.

        It is late if the step, started before its predecessor was observed to complete, was complete by then. Both
        were then observed late, by an unknown time.
        """
        self._observed.wait()  # Python's signal handlers can run in the meantime
        jax.block_until_ready(self.arrays)
        return self._at, self._is_late


class CompletionListener:
    """A thread that observes the completions of a run's steps, in their order."""

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._started: queue.SimpleQueue[StepCompletion | None] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=[self._started, now], daemon=True).start()
        weakref.finalize(self, self._started.put, None)

    def watch(self, arrays: Any) -> StepCompletion:
        """The completion of a step just started, which returns these arrays."""
        completion = StepCompletion(arrays, self._now())
        self._started.put(completion)
        return completion


def _listen(started: "queue.SimpleQueue[StepCompletion | None]", now: Clock) -> None:
    last = now()
    while (completion := started.get()) is not None:
        with suppress(Exception):  # of a warning that cannot be printed
            last = completion.observe(now, last)


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_ready()
