"""The events that a supervisor waits for, its signals, and its log lines."""

import queue
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

# (rank of a worker, its exit code), or one of these kinds with a value:
Events = queue.SimpleQueue[tuple[int, Any]]
SIGNALLED = -1  # the signal that this supervisor has received
FORWARDED = -4  # the signal that the supervisor of another host has received
JOINED = -2  # the number of a host that has joined
MESSAGE = -3  # a message from host 0; None: host 0 is lost

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.25  # between polls: a signal that arrives just before a wait does not end the wait


def put_stop_signals(events: Events) -> None:
    """Turn the stop signals of this process into events, from now on. A SIGHUP that `nohup` ignores stays ignored."""
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, lambda received, _: events.put((SIGNALLED, received)))


def signal_within(seconds: float, events: Events, enough: Callable[[], bool] = lambda: False) -> int:
    """Wait so many seconds, or until `enough()`, for a stop signal; return it, or 0. Other events are dropped."""
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0 and not enough():
        try:
            kind, value = events.get(timeout=min(POLL_S, left_s))
        except queue.Empty:
            continue
        if kind in (SIGNALLED, FORWARDED):
            return int(value)
    return 0


def log(text: str) -> None:
    """Print one line on stderr, unless it is empty."""
    if text:
        print(f"launch: {text}", file=sys.stderr, flush=True)
