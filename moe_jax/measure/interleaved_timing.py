"""Calls that do the same in different ways, timed on a device of this process, in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from moe_jax.measure.quartiles import Quartiles

Call = Callable[[], Any]
_MOST_REPEATS = 100
_LONGEST_REASON = 160


class InterleavedTimes(NamedTuple):
    """What calls took, and which of them do not work here."""

    seconds: dict[str, float]  # of one call, the median over the rounds
    failed: dict[str, str]  # the reason, in a line


def time_interleaved(
    made: Mapping[str, Callable[[], Call]], rounds: int = 7, round_s: float = 0.02
) -> InterleavedTimes:
    """Make each call, which may compile, and run those that work back and forth, each round for about `round_s`.

    So what changes on the machine meanwhile changes all alike.
    """
    calls: dict[str, Call] = {}
    repeats: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, make in made.items():
        try:
            calls[name] = make()
            _seconds(calls[name], 1)  # warm, and with all that is made once
            repeats[name] = min(_MOST_REPEATS, max(1, round(round_s / max(_seconds(calls[name], 1), 1e-9))))
        except Exception as error:  # a compiler's, or of memory: of many types
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON]
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for number in range(rounds):
        for name in times if number % 2 else reversed(times):
            times[name].append(_seconds(calls[name], repeats[name]))
    return InterleavedTimes({name: Quartiles.of(seconds).median for name, seconds in times.items()}, failed)


def _seconds(call: Call, repeats: int) -> float:
    """Of one call, of so many that follow one another."""
    result, start = None, time.perf_counter()
    for _ in range(repeats):
        result = call()  # the one before gives its memory back
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats
