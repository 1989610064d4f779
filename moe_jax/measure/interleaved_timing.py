"""Time several implementations of one operation in interleaved rounds, on this process's devices or on all devices.

Results are the median of repeated measurements, and their spread.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Quartiles(NamedTuple):
    """Quartiles of measured values, interpolated linearly between neighbours."""

    first: float
    median: float
    third: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Return the quartiles of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, method="inclusive"))


Call = Callable[[], Any]
Agree = Callable[[float], float]  # what all processes use instead of their own numbers
_MOST_REPEATS = 100
_LONGEST_REASON = 160


class InterleavedTimes(NamedTuple):
    """The measured times, and the implementations that do not work here."""

    seconds: dict[str, float]  # of one call: the median over rounds
    failed: dict[str, str]  # the reason, in one line


def _own(seconds: float) -> float:
    return seconds


def time_interleaved(
    made: Mapping[str, Callable[[], Call]], rounds: int = 7, round_s: float = 0.02, agree: Agree = _own
) -> InterleavedTimes:
    """Make each call, which may compile, and time the calls that work, each for about `round_s` seconds per round.

    Rounds run through the calls in alternating order, so changes on the machine affect all calls alike. Calls that
    communicate with other processes need `agree`, the largest of the processes' numbers: then all processes call this
    with the same names, leave out the same calls, repeat the others equally often and find the same times.
    """
    calls: dict[str, Call] = {}
    repeats: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, make in made.items():
        own_s = 0.0
        try:
            calls[name] = make()
        except Exception as error:  # compilers raise many types
            failed[name], own_s = _reason(error), math.inf
        if agree(own_s) < math.inf:  # every process made it
            try:
                _seconds(calls[name], 1)  # warm up: compile, and create everything that is created once
                own_s = _seconds(calls[name], 1)
            except Exception as error:  # and so do allocators
                failed[name], own_s = _reason(error), math.inf
            if (slowest_s := agree(own_s)) < math.inf:
                repeats[name] = min(_MOST_REPEATS, max(1, round(round_s / max(slowest_s, 1e-9))))
        if name not in repeats:
            failed.setdefault(name, "it failed on another process")
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for number in range(rounds):
        for name in times if number % 2 else reversed(times):
            times[name].append(_seconds(calls[name], repeats[name]))
    return InterleavedTimes({name: agree(Quartiles.of(seconds).median) for name, seconds in times.items()}, failed)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON]


def _seconds(call: Call, repeats: int) -> float:
    """Return the time of one call, averaged over `repeats` consecutive calls."""
    result, start = None, time.perf_counter()
    for _ in range(repeats):
        result = call()  # frees the previous result
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats
