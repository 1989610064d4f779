"""A command's environment: its standard streams and XLA_FLAGS. A problem is a one-line message.

Imports no jax, and nothing of the project.
"""

import errno
import io
import os
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})  # the system's errors
_FLAGS = "XLA_FLAGS"
_CHECKED = "MOE_JAX_CHECKED_XLA_FLAGS"  # the flags already checked; child processes inherit it and skip the check
_PROBE = "from jaxlib import _jax; _jax.CompileOptions()"  # parses the flags as a compilation does
_LONGEST_S = 60  # time limit for importing jaxlib on a busy machine
_UNKNOWN = r"Unknown flags? in XLA_FLAGS: (?P<unknown>.*)"
_WRONG = r"Couldn't interpret value (?P<value>.*?) for flag (?P<flag>\w+)"


def stream_problem() -> str | None:
    """Return a message if standard output is closed.

    Standard input and error that are closed are opened on the null device. Otherwise the next file that is opened
    would get their numbers, and messages of C++ libraries would be written into it.
    """
    for number in (0, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 – open until the process ends
    return "standard output is closed: send it somewhere, e.g. > /dev/null" if sys.stdout is None else None


class _LossyFile(io.FileIO):
    """A file that loses what its disk has no room for."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            return len(data)


def lose_output_on_full_disk() -> None:
    """Let standard output and error lose what their disk has no room for, from now on.

    It is for processes that run for days, and would end for a line of their log. Streams that a notebook or a program
    has put in their place are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        with suppress(OSError):
            stream.flush()
        lossy = io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering or stream.write_through,
        )
        setattr(sys, name, lossy)


def flags_problem() -> str | None:
    """Return a message if XLA_FLAGS has a flag or value that XLA does not accept.

    XLA itself would abort the process, with a C++ message.
    """
    flags = os.environ.get(_FLAGS, "")
    if not flags.strip() or os.environ.get(_CHECKED) == flags:
        return None
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=_LONGEST_S)
    except (OSError, subprocess.TimeoutExpired):  # the machine has other problems
        return None
    found = re.search(f"{_UNKNOWN}|{_WRONG}", done.stderr.decode(errors="replace"))
    if done.returncode == 0 or found is None:
        os.environ[_CHECKED] = flags
        return None
    if found["unknown"]:
        return f"XLA_FLAGS has {found['unknown'].strip()}, which XLA does not know here: correct it, or leave it out"
    return f"XLA_FLAGS has --{found['flag']}={found['value']}, which is no value of it: correct it, or leave it out"
