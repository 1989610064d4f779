"""The reader for untrusted files: regular files only, with limits on size, nesting depth and digits of numbers.

Errors are an OSError with the file's name, or a ValueError with a reason that callers put in brackets.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

from moe_jax.errors import UserError

MOST_BYTES = 2**26  # bytes of settings and records, which have at most a few thousand lines
MOST_TOKENIZER = 2**28  # bytes of a tokenizer.json
MOST_DEPTH = 64  # nested lists and objects
_MOST_DIGITS = 308  # any integer with this many digits is in the range of a float


def check_regular(path: Path) -> None:
    """Raise OSError unless the path is a regular file: opening a FIFO would block, and a device has no end."""
    os.close(_open_regular(path))


def open_bytes(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError."""
    return os.fdopen(_open_regular(path), "rb")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError."""
    with open_bytes(path) as file:
        size = os.fstat(file.fileno()).st_size or most  # files that the kernel generates on reading have size 0
        content = file.read(min(size, most) + 1)  # read allocates as many bytes as it is asked for
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_text(path: Path, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """Return the content as UTF-8 text without a byte order mark, with line breaks as `\\n`.

    Raises OSError and UnicodeDecodeError.
    """
    text = read_bytes(path, most).decode("utf-8-sig", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file. Raises OSError and ValueError."""
    return parse_json(read_bytes(path, most))


def read_named_json(path: Path, name: str, cure: str, error: type[UserError]) -> Any:
    """Return the value of a JSON file that a user names. Raises `error`, with name and cure, if it is unreadable."""
    try:
        return read_json(path)
    except (OSError, ValueError) as problem:
        is_json = not isinstance(problem, json.JSONDecodeError | UnicodeDecodeError)
        reason = problem.strerror if isinstance(problem, OSError) else str(problem) if is_json else "it is no JSON"
        raise error(f"{name} cannot be read ({reason}): {cure}") from None


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON, too much nesting or too many digits."""
    try:
        found = json.loads(content, parse_int=_whole)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    _check_depth(found)
    return found


def _open_regular(path: Path) -> int:
    try:
        mode = os.stat(path).st_mode  # before opening, since opening a device can already have an effect
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _not_regular(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError:  # a NUL byte or a lone surrogate
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise _not_regular(path)
    return descriptor


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits):,} digits")
    return int(digits)


def _check_depth(found: object) -> None:
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(MOST_DEPTH):
        if not level:
            return
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
