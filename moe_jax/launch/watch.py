"""Watching one generation: wait until its workers end, and end them if one fails or hangs, or on a signal."""

import queue
import signal
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from moe_jax.distributed.heartbeat import SAME_SIGNAL_S
from moe_jax.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED
from moe_jax.launch.events import FORWARDED, JOINED, POLL_S, SIGNALLED, STOP_SIGNALS, Events

FINAL = {EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED}  # exit codes after which a retry is of no use


class Watched(Protocol):
    """A worker of this host or of another one."""

    rank: int
    code: int
    reached: int | None  # steps done
    has_no_mesh: bool  # whether no mesh fits the devices of all workers

    @property
    def is_stopped(self) -> bool: ...
    @property
    def has_begun_a_step(self) -> bool: ...
    def send(self, number: signal.Signals) -> None: ...
    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None: ...
    def finish(self, print_errors: bool) -> None: ...
    def how_it_ended(self) -> str: ...


class Watch:
    """Watches one generation of workers.

    `missing` are hosts without workers in it. `trains` is whether the workers train, so that nothing is lost if they
    are killed before the first step.
    """

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
        self._trains = trains
        self._deadline = float("inf")  # until which workers may end by themselves
        self._next_signal = signal.SIGTERM  # for workers that still run at the deadline
        self._signalled_at = float("inf")  # when this launcher received its first signal
        self.stopped_by = 0  # the signal that stopped the launcher
        self.stopped_in_time = False  # whether it was stopped before there was anything to save
        self.newcomer: int | None = None  # the host for which the generation was ended
        self.failed: Watched | None = None  # the worker that failed first
        self.failure = ""  # how it failed

    def until_all_have_ended(self) -> None:
        """Handle events until all workers have ended."""
        while self._running:
            try:
                kind, value = self._events.get(timeout=POLL_S)
            except queue.Empty:
                self._check_deadlines()
                continue
            if kind >= 0:
                self._has_ended(self._workers[kind], value)
            elif kind == SIGNALLED and time.monotonic() - self._signalled_at > SAME_SIGNAL_S:
                self._end(signal.SIGKILL)
            elif kind in (SIGNALLED, FORWARDED):  # signals of other hosts, which may be the same one, never kill
                if kind == SIGNALLED:
                    self._signalled_at = min(self._signalled_at, time.monotonic())
                self._stop(value)
            elif kind == JOINED and value in self._missing:
                self._restart_with(value)

    def _check_deadlines(self) -> None:
        if time.monotonic() > self._deadline:
            self._end(self._next_signal)
        elif self.failed is None and not self.stopped_by:
            hanging = {worker: reason for worker in self._running if (reason := worker.overdue(*self._limits_s))}
            if hanging:  # blame a stopped worker, for which the others wait, or else the one with the fewest steps
                worst = min(hanging, key=lambda worker: (not worker.is_stopped, worker.reached or 0, worker.rank))
                self.failed, self.failure = worst, f"hangs ({hanging[worst]})"
                self._end(signal.SIGKILL)

    def _has_ended(self, worker: Watched, code: int) -> None:
        self._running.remove(worker)
        worker.code = code
        if not code or self.failed is not None or self.stopped_by:
            return
        if -code in STOP_SIGNALS:  # a worker that could not handle the signal yet; such a signal is for the run
            self._stop(-code)
            return
        self.failed, self.failure = worker, f"failed first, {worker.how_it_ended()}"
        if code in FINAL:  # other workers may be about to fail in the same way, or to save
            self._deadline = time.monotonic() + self._grace_s
        else:
            self._end(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        """End the generation because of a signal."""
        if not self.stopped_by:
            self.stopped_in_time = self._trains and not any(worker.has_begun_a_step for worker in self._workers)
            self._end(signal.SIGKILL if self.stopped_in_time else signal.SIGTERM)
        elif self.newcomer is None:
            return
        self.newcomer, self.stopped_by = None, number

    def _restart_with(self, host: int) -> None:
        """End the generation as for a signal, so that the next one includes that host."""
        if self.failed is None and not self.stopped_by:
            self._stop(signal.SIGTERM)
            self.newcomer = host

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to all running workers, and SIGKILL to those that still run after the grace time."""
        for worker in self._running:
            worker.send(number)
        self._next_signal = signal.SIGKILL
        self._deadline = time.monotonic() + self._grace_s
