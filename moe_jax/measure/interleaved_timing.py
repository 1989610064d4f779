"""Time several implementations of one operation on a device of this process, in interleaved rounds."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from moe_jax.measure.quartiles import Quartiles

Call = Callable[[], Any]
_MOST_REPEATS = 100
_LONGEST_REASON = 160


class InterleavedTimes(NamedTuple):
    """The measured times, and the implementations that do not work here."""

    seconds: dict[str, float]  # of one call: the median over rounds
    failed: dict[str, str]  # the reason, in one line


def time_interleaved(
    made: Mapping[str, Callable[[], Call]], rounds: int = 7, round_s: float = 0.02
) -> InterleavedTimes:
    """Make each call, which may compile, and time the calls that work, each for about `round_s` seconds per round.

    Rounds run through the calls in alternating order, so changes on the machine affect all calls alike.
    """
    calls: dict[str, Call] = {}
    repeats: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, make in made.items():
        try:
            calls[name] = make()
            _seconds(calls[name], 1)  # warm up: compile, and create everything that is created once
            repeats[name] = min(_MOST_REPEATS, max(1, round(round_s / max(_seconds(calls[name], 1), 1e-9))))
        except Exception as error:  # compilers and allocators raise many types
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON]
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for number in range(rounds):
        for name in times if number % 2 else reversed(times):
            times[name].append(_seconds(calls[name], repeats[name]))
    return InterleavedTimes({name: Quartiles.of(seconds).median for name, seconds in times.items()}, failed)


def _seconds(call: Call, repeats: int) -> float:
    """Return the time of one call, averaged over `repeats` consecutive calls."""
    result, start = None, time.perf_counter()
    for _ in range(repeats):
        result = call()  # frees the previous result
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats
