"""Timing in rounds of consecutive steps, long enough that waiting for the last one of a round costs little."""

from collections.abc import Callable

_ROUNDS = 5


def seconds_in_rounds(run: Callable[[int], float], clock_s: float) -> list[float]:
    """Return seconds per step of each round, all rounds in about `clock_s`; `run(n)` returns seconds per step of n."""
    steps = max(1, round(clock_s / _ROUNDS / run(1)))
    return [run(steps) for _ in range(_ROUNDS)]
