"""Errors that a user can fix, reported in one line, what they suggest, and the exit codes of every command."""

import argparse
import errno
import io
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from moe_jax.environment import FULL_DISK, flags_problem, stream_problem
from moe_jax.paths import plain_path, shown

EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_TRY_AGAIN = 75  # another process or a store failed, not this one; sysexits.h calls it EX_TEMPFAIL
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_UNREAD = 141  # 128 + SIGPIPE: nobody reads the output any more
# The system's errors for a path that a user got wrong.
_BAD_NAME = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO, errno.ENODEV),
}


_LONGEST = 4000  # the most characters of a message


class UserError(Exception):
    """Bad input. The message is one line that gives the name, the value and the cure."""

    exit_code = EXIT_BAD_INPUT


class ConfigError(UserError):
    """A setting that is unknown, has the wrong type, or contradicts another one."""


class MeshError(UserError):
    """A mesh that these devices or this model cannot form."""


class DataError(UserError):
    """A text or token file that is missing, damaged, or made for another vocabulary."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model."""


class OutageError(CheckpointError):
    """Checkpoints that cannot be read for the moment, of which nothing else is known. The launcher tries again."""

    exit_code = EXIT_TRY_AGAIN


class DivergedError(UserError):
    """Training that diverged numerically: the same command would diverge again."""

    exit_code = EXIT_DIVERGED


class CommandParser(argparse.ArgumentParser):
    """A parser of command lines that reports an error in one line, and does not accept an empty Path."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        """Report the error and exit with the code of invalid input."""
        _exit_with(f"{message}: see {self.prog} --help")


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. On a UserError or an invalid path, print one line on stderr and exit with its code.

    Ctrl-C, unless `main` handles it, becomes one line and exit code 130.
    """
    if problem := stream_problem() or flags_problem():
        _exit_with(problem)
    for stream in (sys.stdout, sys.stderr):  # sampled text may contain characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        _exit_with(str(error), error.exit_code)
    except KeyboardInterrupt:
        _exit_with("interrupted", EXIT_INTERRUPTED, kind="stopped")
    except BrokenPipeError:  # the reader of the output has gone (`… | head`), so nothing can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_UNREAD)
    except OSError as error:
        if not is_bad_path(error):
            raise
        if error.errno in FULL_DISK:
            place = error.filename or ("standard output" if _output_is_full() else "a file or standard output")
            _exit_with(f"{place}: {error.strerror}: free some space on that disk")
        _exit_with(f"{os.fspath(error.filename)}: {error.strerror}: name another file or folder")


def _output_is_full() -> bool:
    """Whether standard output takes no more text. If so, the rest is dropped, which Python would write at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def is_bad_path(error: OSError) -> bool:
    """Whether the system's error is of a path that a user got wrong, or of a full disk."""
    return error.errno in FULL_DISK or (error.errno in _BAD_NAME and error.filename is not None)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is a full disk; errors of libraries are recognised by their text."""
    if error is None:
        return False
    by_number = isinstance(error, OSError) and error.errno in FULL_DISK
    return by_number or any(os.strerror(each) in str(error) for each in FULL_DISK) or is_full_disk(error.__cause__)


def unwritable(name: str, folder: Path, error: OSError) -> ConfigError:
    """Return the error for a setting whose folder cannot be written."""
    cure = "free some space, or name another folder" if is_full_disk(error) else "name another folder"
    return ConfigError(f"{name}={folder} cannot be written ({error.strerror}): {cure}")


def parse_path(name: str, text: str) -> Path:
    """Return a path from a command line with `~` and variables replaced; `name` is the argument. Raises ConfigError."""
    return Path(plain_argument(name, text))


def plain_argument(name: str, text: str, buckets: bool = False) -> str:
    """Do the same for an argument that may be the URL of a folder or file in a bucket, if `buckets` is set."""
    try:
        return plain_path(text, buckets)
    except ValueError as error:
        raise ConfigError(f"{name} {text} {error}") from None


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} names no file or folder")
    try:
        return Path(plain_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} {error}") from None


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def _exit_with(message: str, code: int = EXIT_BAD_INPUT, kind: str = "error") -> NoReturn:
    message = " ".join(shown(message).splitlines())
    line = "".join(each if each.isprintable() else _escaped(each) for each in message)
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    with suppress(OSError):  # stderr has no reader
        sys.stderr.write(f"{kind}: {line}\n")  # in one call, since other processes may write, too
        sys.stderr.flush()
    sys.exit(code)


def nearest_multiples(number: int, unit: int) -> str:
    """Return the positive multiples of `unit` next to a number that is not one: "6 or 9" for 8 and 3."""
    lower = number - number % unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def as_yaml(value: object) -> object:
    """Return what messages say for the value of a setting: null, true and false, and lists, as in a config file."""
    if isinstance(value, tuple):
        return list(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def all_of(names: tuple[str, ...]) -> str:
    """Return the names in words: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def divisors_text(n: int) -> str:
    """Return the divisors of `n`: "1, 2 or 4" for 4."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = [str(d) for d in sorted({*small, *(n // d for d in small)})]
    if len(divisors) > 6:
        divisors = [*divisors[:5], divisors[-1]]
        return ", ".join(divisors[:-1]) + f" … or {divisors[-1]}"
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + f" or {divisors[-1]}"
