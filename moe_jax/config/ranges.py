"""Ranges of numbers in settings and on command lines.

The largest values are far above published models and clusters. They are small enough that work which depends on a
single setting neither takes minutes nor fills the memory before a run is rejected for its size.
"""

import math
from dataclasses import field
from typing import NamedTuple, TypeVar

from moe_jax.errors import ConfigError

T = TypeVar("T")


class Range(NamedTuple):
    """The smallest and the largest value of a number; `above` and `below` exclude that value itself."""

    least: float
    most: float
    above: bool = False
    below: bool = False


ANY = 2**31 - 1  # steps and seeds are 32-bit numbers in jax; a large one costs nothing by itself
BLOCKS = 4096  # loops visit every block of a model,
PARTS = 1024  # and every part of a step
WIDTH = 2**20  # features of a hidden layer
EXPERTS = 2**16
SEQUENCE = 2**24  # tokens
LARGE = 1e6  # factors
FINITE = 1e30  # a number that float32 can represent

BUCKET = Range(1e-4, LARGE)  # 10⁶ bytes; a smaller bucket costs more than its transfer
SEEDS = Range(0, ANY)
SAMPLED = Range(0, 2**16)  # tokens
SIMULATED = Range(1, 512)  # devices; each has several threads, and a copy of every replicated array
CLUSTER = Range(1, 2**20)  # devices, or processes
ALONG_AXIS = Range(-ANY, CLUSTER.most)  # devices; `check_mesh`: at least 1, or -1


def number(default: T, allowed: Range) -> T:
    """Return a dataclass field with a default and the range that `check_ranges` checks; null is always allowed.

    For a list, the range is that of each number, and other rules check it.
    """
    value: T = field(default=default, metadata={"range": allowed})
    return value


def check_number(name: str, value: float | None, allowed: Range, or_null: str = "") -> None:
    """Raise ConfigError if a number of a config or command line is out of its range. None is allowed."""
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value} must be a finite number")
    least, most, above, below = allowed
    too_small = value <= least if above else value < least
    too_large = value >= most if below else value > most
    if not too_small and not too_large:
        return
    if below:
        words = f"lie between {least} and {most}" if above else f"be at least {least} and below {most}"
    else:
        words = f"be at most {most:.15g}" if too_large else f"be {'above' if above else 'at least'} {least}{or_null}"
    raise ConfigError(f"{name}={value} must {words}")
