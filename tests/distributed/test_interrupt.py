"""Signals to a run of one process: it stops once, and ends at a second request."""

import os
import signal
import time

import pytest

from moe_jax.distributed import interrupt
from moe_jax.distributed.interrupt import stop_on_signals

# A test must not send the signal that ends its own process: it asks what the signal would do.


def ends_the_process(number: int) -> bool:
    c_signal = interrupt._c_signal()
    handler = c_signal(number, None)
    c_signal(number, handler)
    return handler is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_within_a_second_are_one_request(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may signal a process twice; the run still saves. A later one is a second request."""
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.reached()
        os.kill(os.getpid(), number)
        assert stop.reached()
        assert not ends_the_process(number)
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    monkeypatch.setattr(interrupt, "SAME_SIGNAL_S", 0.05)
    with stop_on_signals():
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 30
        while not ends_the_process(number):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert signal.getsignal(number) == before
    assert not ends_the_process(number) or before == signal.SIG_DFL
