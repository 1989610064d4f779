"""The command line of a benchmark that only wants to know how often, or how long."""

import sys
from pathlib import Path

from moe_jax.errors import CommandParser, ConfigError


def count_argument(name: str, default: int, description: str | None) -> int:
    """A number from 1 up, or the default. Raises ConfigError."""
    program = f"python profiling/{Path(sys.argv[0]).name}"
    parser = CommandParser(prog=program, description=description)
    parser.add_argument("count", metavar=name, nargs="?", type=int, default=default, help="default: %(default)s")
    count: int = parser.parse_args().count
    if count < 1:
        raise ConfigError(f"{name}={count} must be at least 1")
    return count
