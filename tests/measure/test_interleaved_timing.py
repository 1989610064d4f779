"""Calls that do the same, timed in turn: with a clock of the test's own."""

import itertools
import math

import jax
import pytest

from moe_jax.measure import interleaved_timing
from moe_jax.measure.interleaved_timing import time_interleaved


class Clock:
    """Stands still but for what calls take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(interleaved_timing.time, "perf_counter", lambda: self.now)

    def call(self, name: str, *seconds: float):
        """Made into a call that takes these seconds, one after another, again and again."""
        taken = itertools.cycle(seconds)

        def run() -> None:
            self.log.append(name)
            self.now += next(taken)

        return lambda: run


def test_calls_run_back_and_forth_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    made = {"even": clock.call("even", 1.0), "uneven": clock.call("uneven", 1.0, 1.0, 9.0, 2.0, 3.0)}
    found = time_interleaved(made, rounds=3)
    assert found.seconds == {"even": 1.0, "uneven": 3.0}, "of what follows the first two calls"
    assert not found.failed
    assert clock.log[4:] == ["uneven", "even", "even", "uneven", "uneven", "even"]


def test_a_short_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = time_interleaved({"short": clock.call("short", 0.001)}, rounds=2, round_s=0.02)
    assert found.seconds == {"short": pytest.approx(0.001)}
    assert len(clock.log) == 2 + 2 * 20


def refused():
    raise NotImplementedError("no such kernel\nand much more")


def test_what_does_not_work_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    made = {"good": clock.call("good", 1.0), "not compiled": refused, "not run": lambda: refused}
    found = time_interleaved(made, rounds=2)
    assert found.seconds == {"good": 1.0}
    assert found.failed == dict.fromkeys(["not compiled", "not run"], "NotImplementedError: no such kernel")


def test_processes_time_the_same_calls_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest process counts, and what fails on another one is left out here as well."""
    clock, others = Clock(monkeypatch), iter([0.0, 0.01, math.inf, 0.0, math.inf, 0.02])
    made = {"good": clock.call("good", 0.001), "not made": refused, "not run": clock.call("not run", 0.001)}
    found = time_interleaved(made, rounds=2, round_s=0.02, agree=lambda own: max(own, next(others)))
    assert found.seconds == {"good": 0.02}
    assert found.failed == {
        "not made": "NotImplementedError: no such kernel",
        "not run": "it failed on another process",
    }
    assert clock.log.count("good") == 2 + 2 * 2, "as often as the slowest process can in a round"


def test_a_call_is_timed_until_its_result_is_there() -> None:
    function = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
    found = time_interleaved({"product": lambda: lambda: function(jax.numpy.ones((64, 64)))}, rounds=2, round_s=0.001)
    assert found.seconds["product"] > 0
