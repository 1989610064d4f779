"""SIGINT and SIGTERM: finish the step, save, exit 0. A second signal ends a lone process at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether a signal asked for the end of the run."""

    def __init__(self) -> None:
        self._signalled = False

    def reached(self, step: int) -> bool:
        """True on every process at one and the same step, soon after any of them got a signal."""
        if jax.process_count() > 1:
            # jax's own SIGTERM handler tells the other processes, and they agree on a step
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._signalled

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        signal.signal(number, signal.SIG_DFL)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """What jax's handler does not listen to, as what it does."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM inside this context, where they can be handled (the main thread)."""
    request = StopRequest()
    alone = {signal.SIGINT: request._remember, signal.SIGTERM: request._remember}
    handlers = alone if jax.process_count() == 1 else {signal.SIGINT: _pass_on}
    before = {}
    try:
        for number, handler in handlers.items():
            before[number] = signal.signal(number, handler)
    except ValueError:  # in a thread, e.g. of a notebook: the caller keeps its own handlers
        pass
    try:
        yield request
    finally:
        for number, former in before.items():
            signal.signal(number, former)
