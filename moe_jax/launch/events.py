"""What a supervisor waits for, and its signals."""

import queue
import signal
import time
from collections.abc import Callable
from typing import Any

# (rank of a worker, its exit code), or one of these with …
Events = queue.SimpleQueue[tuple[int, Any]]
SIGNALLED = -1  # the signal that this supervisor got
FORWARDED = -4  # the signal that one of another host got
JOINED = -2  # the number of another host
TOLD = -3  # what host 0 tells this one; None: it is lost

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.25  # between looks: a signal that comes just before a wait does not end it


def put_stop_signals(events: Events) -> None:
    """From now on this process's stop signals are events."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda received, _: events.put((SIGNALLED, received)))


def signal_within(seconds: float, events: Events, enough: Callable[[], bool] = lambda: False) -> int:
    """The signal that comes in that time, or until it is `enough`; 0: none. Other events go by."""
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0 and not enough():
        try:
            kind, value = events.get(timeout=min(LOOK_S, left_s))
        except queue.Empty:
            continue
        if kind in (SIGNALLED, FORWARDED):
            return int(value)
    return 0
