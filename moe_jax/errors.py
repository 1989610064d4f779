"""Mistakes a user can make, told in one line, and the exit codes of every command."""

import os
import sys
from collections.abc import Callable

EXIT_DONE = 0
EXIT_BAD_INPUT = 2


class UserError(Exception):
    """Bad input. The message is one line that gives the name, the value and the cure."""


class ConfigError(UserError):
    """A setting that is unknown, has the wrong type, or contradicts another one."""


class MeshError(UserError):
    """A mesh that these devices or this model cannot form."""


class DataError(UserError):
    """A text or token file that is missing, damaged, or made for another vocabulary."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model."""


def run_command(main: Callable[[], None]) -> None:
    """Run a command line's `main`; a UserError becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(EXIT_BAD_INPUT)
    except BrokenPipeError:  # the reader of our output went away (`… | head`): nothing to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
