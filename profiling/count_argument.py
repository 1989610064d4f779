"""Numbers on the command line of a benchmark: how often, or how long."""

import argparse
import sys
from pathlib import Path

from moe_jax.config.ranges import Range, check_number
from moe_jax.errors import CommandParser, ConfigError


def count_argument(name: str, default: int, description: str | None) -> int:
    """A number from 1 up, or the default. Raises ConfigError."""
    program = f"python profiling/{Path(sys.argv[0]).name}"
    parser = CommandParser(prog=program, description=description)
    parser.add_argument("count", metavar=name, nargs="?", type=int, default=default, help="default: %(default)s")
    count: int = parser.parse_args().count
    check_number(name, count, Range(1, 10**6))
    return count


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    """Numbers that options were given, if they were, against the least of each. Raises ConfigError."""
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be at least {bound}")
