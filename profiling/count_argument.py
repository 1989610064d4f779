"""Numeric arguments of benchmarks, such as counts and durations: parsing and checks."""

import argparse
import sys
from pathlib import Path

from moe_jax.config.ranges import Range, check_number
from moe_jax.errors import CommandParser, ConfigError


def count_argument(name: str, default: int, description: str | None) -> int:
    """Parse a program's optional argument `name`: a number from 1 up, or the default. Raises ConfigError."""
    program = f"python profiling/{Path(sys.argv[0]).name}"
    parser = CommandParser(prog=program, description=description)
    parser.add_argument("count", metavar=name, nargs="?", type=int, default=default, help="default: %(default)s")
    count: int = parser.parse_args().count
    check_number(name, count, Range(1, 10**6))
    return count


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    """Check options that are not None against a lower bound for each. Raises ConfigError."""
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be at least {bound}")
