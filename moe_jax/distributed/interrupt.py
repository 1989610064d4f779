"""SIGINT and SIGTERM: finish the step, save, exit 0. A second signal ends a process at once."""

import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from moe_jax.distributed.heartbeat import SAME_SIGNAL_S

_asked = itertools.count(1)  # how often this process has asked the others


class StopRequest:
    """Whether a signal asked for the end of the run."""

    def __init__(self) -> None:
        self._signalled = False

    def reached(self) -> bool:
        """Asked before every step: True on all processes before the same one, soon after any of them got a signal."""
        if jax.process_count() > 1:
            # jax's own SIGTERM handler tells the other processes, and they agree on the number after the largest that
            # any has passed. One that has passed none counts as at 0: the steps of a resumed run would not do
            return bool(multihost_utils.reached_preemption_sync_point(next(_asked)))
        return self._signalled

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM inside this context, where they can be handled (the main thread)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # e.g. of a notebook, which keeps its own handlers
        yield request
    elif jax.process_count() > 1:
        with _handled(signal.SIGINT, _pass_on), _ends_on_a_second_sigterm():
            yield request
    else:
        with _handled(signal.SIGINT, request._remember), _handled(signal.SIGTERM, request._remember):
            yield request


def _pass_on(number: int, frame: FrameType | None) -> None:
    """What jax's handler does not listen to, as what it does."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _ends_on_a_second_sigterm() -> Iterator[None]:
    """Let the first SIGTERM be jax's, which would take all; one that comes SAME_SIGNAL_S later ends the process.

    It does so even while the main thread waits in a collective, where handlers in Python are not called: Python's own
    handler writes to a pipe at once, and another thread reads it.
    """
    c_signal = _c_signal()
    of_jax = c_signal(signal.SIGTERM, None)  # no Python function: `signal.signal` could not put it back
    if of_jax in (None, signal.SIG_IGN):  # jax has none on this platform
        c_signal(signal.SIGTERM, of_jax)
        yield
        return
    arrivals, arrived = os.pipe()
    os.set_blocking(arrived, False)
    received = threading.Event()

    def listen() -> None:
        with os.fdopen(arrivals, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGTERM:
                    received.set()
                    ctypes.CFUNCTYPE(None, ctypes.c_int)(of_jax)(signal.SIGTERM)
                    time.sleep(SAME_SIGNAL_S)
                    c_signal(signal.SIGTERM, None)
                    return

    threading.Thread(target=listen, daemon=True).start()
    before = signal.set_wakeup_fd(arrived, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        if not received.is_set():
            c_signal(signal.SIGTERM, of_jax)
        signal.set_wakeup_fd(before)
        os.close(arrived)


def _c_signal() -> Any:
    """C's `signal`: (number, handler or None for the default) → the handler before."""
    found = ctypes.CDLL(None).signal
    found.argtypes, found.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return found
