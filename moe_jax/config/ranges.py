"""Ranges of numbers, of settings and of command lines.

The largest values are far above published models and clusters, and small enough that what depends on one of them alone
neither takes minutes nor fills the memory before a run is refused for its size.
"""

import math
from dataclasses import field
from typing import NamedTuple, TypeVar

from moe_jax.errors import ConfigError

T = TypeVar("T")


class Range(NamedTuple):
    """The smallest and the largest value that a number may have; `above`, `below`: without this value itself."""

    least: float
    most: float
    above: bool = False
    below: bool = False


ANY = 2**31 - 1  # jax counts steps and takes seeds in 32 bits; such a number costs nothing by itself
BLOCKS = 4096  # each of which is looked at, as is each part of a step
PARTS = 1024
WIDTH = 2**20  # of a hidden layer
EXPERTS = 2**16
SEQUENCE = 2**24
LARGE = 1e6  # of factors
FINITE = 1e30  # of what float32 holds

SEEDS = Range(0, ANY)
SAMPLED = Range(0, 2**16)  # tokens
SIMULATED = Range(1, 512)  # devices, each with several threads and copies of what is not cut
CLUSTER = Range(1, 2**20)  # devices, or processes
ALONG_AXIS = Range(-ANY, CLUSTER.most)  # devices; `check_mesh`: at least 1, or -1


def number(default: T, allowed: Range) -> T:
    """The field of a setting with its default, which `check_ranges` holds against `allowed`; null is always allowed.

    Of a list of numbers, the range is that of each; other rules check it.
    """
    value: T = field(default=default, metadata={"range": allowed})
    return value


def check_number(name: str, value: float | None, allowed: Range, or_null: str = "") -> None:
    """Raise ConfigError for a number that is given, of a config or a command line, and out of its range."""
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
