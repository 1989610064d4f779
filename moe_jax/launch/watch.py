"""Waits for the end of workers that run together, and brings it about when one fails or hangs, or on a signal."""

import queue
import signal
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from moe_jax.distributed.heartbeat import SAME_SIGNAL_S
from moe_jax.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED
from moe_jax.launch.events import FORWARDED, JOINED, LOOK_S, SIGNALLED, STOP_SIGNALS, Events

FINAL = {EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED}  # a mistake would be made again


class Watched(Protocol):
    """A worker of this host or another one."""

    rank: int
    code: int
    reached: int | None  # steps done
    has_no_mesh: bool  # that its devices and those of the others could form

    @property
    def is_stopped(self) -> bool: ...
    @property
    def has_begun_a_step(self) -> bool: ...
    def send(self, number: signal.Signals) -> None: ...
    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None: ...
    def finish(self, tell_errors: bool) -> None: ...
    def how_it_ended(self) -> str: ...


class Watch:
    """Of one generation; `missing` are hosts that have no part in it."""

    def __init__(
        self,
        workers: Sequence[Watched],
        events: Events,
        *,
        missing: Collection[int],
        grace_s: float,
        start_timeout_s: float,
        progress_timeout_s: float,
        trains: bool,
    ) -> None:
        self._workers, self._events, self._missing = workers, events, missing
        self._grace_s, self._limits_s = grace_s, (start_timeout_s, progress_timeout_s)
        self._running = set(workers)
        self._trains = trains  # and loses nothing before its first step
        self._deadline = float("inf")  # for ending by themselves
        self._next_signal = signal.SIGTERM  # that those get which run at the deadline
        self._signalled_at = float("inf")  # this launcher, first
        self.stopped_by = 0  # the signal that stopped the launcher
        self.stopped_in_time = False  # before there was anything to save
        self.newcomer: int | None = None  # the host for which the generation was ended
        self.failed: Watched | None = None  # first
        self.how = ""  # it failed

    def until_all_have_ended(self) -> None:
        while self._running:
            try:
                kind, value = self._events.get(timeout=LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if kind >= 0:
                self._has_ended(self._workers[kind], value)
            elif kind == SIGNALLED and time.monotonic() - self._signalled_at > SAME_SIGNAL_S:
                self._end(signal.SIGKILL)
            elif kind in (SIGNALLED, FORWARDED):  # those of other hosts, which may have got the same one, never kill
                if kind == SIGNALLED:
                    self._signalled_at = min(self._signalled_at, time.monotonic())
                self._is_told_to_stop(value)
            elif kind == JOINED and value in self._missing:
                self._makes_room(value)

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            self._end(self._next_signal)
        elif self.failed is None and not self.stopped_by:
            hanging = {worker: how for worker in self._running if (how := worker.overdue(*self._limits_s))}
            if hanging:  # one that is stopped makes the others wait, and so does the one that has come least far
                worst = min(hanging, key=lambda worker: (not worker.is_stopped, worker.reached or 0, worker.rank))
                self.failed, self.how = worst, f"hangs ({hanging[worst]})"
                self._end(signal.SIGKILL)

    def _has_ended(self, worker: Watched, code: int) -> None:
        self._running.remove(worker)
        worker.code = code
        if not code or self.failed is not None or self.stopped_by:
            return
        if -code in STOP_SIGNALS:  # before it could handle the signal: who ends a worker so means the run
            self._is_told_to_stop(-code)
            return
        self.failed, self.how = worker, f"failed first, {worker.how_it_ended()}"
        if code in FINAL:  # others may be about to say the same, or save
            self._deadline = time.monotonic() + self._grace_s
        else:
            self._end(signal.SIGKILL)

    def _is_told_to_stop(self, number: int) -> None:
        if not self.stopped_by:
            self.stopped_in_time = self._trains and not any(worker.has_begun_a_step for worker in self._workers)
            self._end(signal.SIGKILL if self.stopped_in_time else signal.SIGTERM)
        elif self.newcomer is None:
            return
        self.newcomer, self.stopped_by = None, number

    def _makes_room(self, host: int) -> None:
        """End the generation as by a signal, so that the next one has that host, too."""
        if self.failed is None and not self.stopped_by:
            self._is_told_to_stop(signal.SIGTERM)
            self.newcomer = host

    def _end(self, number: signal.Signals) -> None:
        for worker in self._running:
            worker.send(number)
        self._next_signal = signal.SIGKILL
        self._deadline = time.monotonic() + self._grace_s
