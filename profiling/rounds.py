"""Rounds of steps in a row, long enough that waiting for the last one of a round costs little."""

from collections.abc import Callable

_ROUNDS = 5


def seconds_in_rounds(run: Callable[[int], float], clock_s: float) -> list[float]:
    """Seconds of one step in each round, all rounds in about `clock_s`; `run(n)` says them of n steps in a row."""
    steps = max(1, round(clock_s / _ROUNDS / run(1)))
    return [run(steps) for _ in range(_ROUNDS)]
