"""What a supervisor makes of signals while workers run."""

import os
import queue
import signal
import threading
import time

import pytest

from moe_jax.launch import watch
from moe_jax.launch.events import FORWARDED, SIGNALLED, STOP_SIGNALS, Events, put_stop_signals

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Worker:
    """Ends some time after it was asked to."""

    rank, code, reached, has_no_mesh, is_stopped, has_begun_a_step = 0, 0, 3, False, False, True

    def __init__(self, events: Events) -> None:
        self.sent: list[signal.Signals] = []
        self._events = events

    def send(self, number: signal.Signals) -> None:
        if not self.sent:
            threading.Timer(0.6, self._events.put, [(self.rank, 0)]).start()
        self.sent.append(number)

    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None:
        return None

    def finish(self, print_errors: bool) -> None:
        raise AssertionError("not while it is watched")

    def how_it_ended(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("kinds", "sent"),
    [
        ([SIGNALLED, FORWARDED], [TERM]),
        ([FORWARDED, SIGNALLED], [TERM]),
        ([FORWARDED, FORWARDED], [TERM]),
        ([SIGNALLED, SIGNALLED], [TERM, KILL]),
        ([FORWARDED, SIGNALLED, SIGNALLED], [TERM, KILL]),
    ],
)
def test_only_a_second_signal_to_the_same_launcher_kills(
    kinds: list[int], sent: list[signal.Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch system may reach the launchers of two hosts far apart: those of others never kill."""
    monkeypatch.setattr(watch, "SAME_SIGNAL_S", 0.1)
    events: Events = queue.SimpleQueue()
    worker = Worker(events)
    watched = watch.Watch(
        [worker],
        events,
        missing=(),
        grace_s=60,
        start_timeout_s=60,
        progress_timeout_s=60,
        trains=True,
    )

    def signals() -> None:
        for kind in kinds:
            events.put((kind, TERM))
            time.sleep(0.2)

    thread = threading.Thread(target=signals)
    thread.start()
    watched.until_all_have_ended()
    thread.join()
    assert worker.sent == sent
    assert watched.stopped_by == TERM


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_hangup_of_a_terminal_does_not_reach_a_launcher_under_nohup(is_ignored: bool) -> None:
    """Without nohup, and for other signals, it asks the run to save and end."""
    events: Events = queue.SimpleQueue()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        put_stop_signals(events)
        for number in (signal.SIGHUP, TERM):
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    received = [events.get_nowait() for _ in range(events.qsize())]
    assert received == [(SIGNALLED, number) for number in ([TERM] if is_ignored else [signal.SIGHUP, TERM])]
