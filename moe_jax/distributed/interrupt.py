"""Handling of SIGINT and SIGTERM: finish the step, save, exit 0. A second signal, a second later, ends a process."""

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

_sync_points = itertools.count(1)  # numbers of the agreements with other processes


class StopRequest:
    """A request to stop the run, made by a signal."""

    def __init__(self) -> None:
        self._signalled = False

    def reached(self) -> bool:
        """Whether to stop; call it before every step. True on all processes at one step, soon after a signal to any."""
        if jax.process_count() > 1:
            # jax's own SIGTERM handler informs the other processes, and they agree on the number after the largest that
            # any has passed. A process begins at 0, so the step numbers of a resumed run cannot be used
            return bool(multihost_utils.reached_preemption_sync_point(next(_sync_points)))
        return self._signalled

    def _set(self) -> None:
        self._signalled = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM inside this context, where they can be handled (the main thread)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # e.g. in a notebook, which has its own handlers
        yield request
    elif jax.process_count() > 1:
        with _handled(signal.SIGINT, _forward_as_sigterm), _exit_on_second_sigterm():
            yield request
    else:
        with _handled_once(signal.SIGINT, request._set), _handled_once(signal.SIGTERM, request._set):
            yield request


def _forward_as_sigterm(number: int, frame: FrameType | None) -> None:
    """Send SIGTERM, which jax's handler receives, for a signal that it does not."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _handled_once(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at a signal; one that arrives SAME_SIGNAL_S after the first ends the process, whatever it does."""
    timers: list[threading.Timer] = []
    c_signal = _c_signal()  # `signal.signal` works only in the main thread

    def handle(received: int, frame: FrameType | None) -> None:
        action()
        if not timers:
            timers.append(threading.Timer(SAME_SIGNAL_S, c_signal, [number, None]))
            timers[0].daemon = True
            timers[0].start()

    with _handled(number, handle):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()


@contextmanager
def _exit_on_second_sigterm() -> Iterator[None]:
    """Pass only the first SIGTERM to jax's handler; one that arrives SAME_SIGNAL_S later ends the process.

    This works even while the main thread waits in a collective, where handlers in Python are not called: the signal
    handler of the interpreter writes to a pipe at once, and another thread reads from it.
    """
    c_signal = _c_signal()
    jax_handler = c_signal(signal.SIGTERM, None)  # not a Python function: `signal.signal` could not restore it
    if jax_handler in (None, signal.SIG_IGN):  # jax has no handler on this platform
        c_signal(signal.SIGTERM, jax_handler)
        yield
        return
    pipe_out, pipe_in = os.pipe()
    os.set_blocking(pipe_in, False)
    received = threading.Event()

    def listen() -> None:
        with os.fdopen(pipe_out, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGTERM:
                    received.set()
                    ctypes.CFUNCTYPE(None, ctypes.c_int)(jax_handler)(signal.SIGTERM)
                    time.sleep(SAME_SIGNAL_S)
                    c_signal(signal.SIGTERM, None)
                    return

    threading.Thread(target=listen, daemon=True).start()
    before = signal.set_wakeup_fd(pipe_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        if not received.is_set():
            c_signal(signal.SIGTERM, jax_handler)
        signal.set_wakeup_fd(before)
        os.close(pipe_in)


def _c_signal() -> Any:
    """Return C's function `signal`: (number, handler or None for the default) → the previous handler."""
    found = ctypes.CDLL(None).signal
    found.argtypes, found.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return found
