"""Checks of a command's environment: its standard streams and XLA_FLAGS. A problem is a one-line message.

Imports no jax, and nothing of the project.
"""

import os
import re
import subprocess
import sys

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
