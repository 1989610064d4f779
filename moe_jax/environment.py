"""What a command finds around it: its standard streams, and the flags of XLA. Each problem is a line to tell.

Imports no jax, and nothing of the project.
"""

import os
import re
import subprocess
import sys

_FLAGS = "XLA_FLAGS"
_CHECKED = "MOE_JAX_CHECKED_XLA_FLAGS"  # for the processes that this one starts
_PROBE = "from jaxlib import _jax; _jax.CompileOptions()"  # reads the flags as a compilation does
_LONGEST_S = 60  # that a busy machine may take to import jaxlib
_UNKNOWN = r"Unknown flags? in XLA_FLAGS: (?P<unknown>.*)"
_WRONG = r"Couldn't interpret value (?P<value>.*?) for flag (?P<flag>\w+)"


def stream_problem() -> str | None:
    """Whether nothing can be said on standard output. Standard input and error that are closed are opened on nothing,
    or the next file that is opened would get their numbers, and what C++ says would be written into it."""
    for number in (0, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 – as long as the process
    return "standard output is closed: send it somewhere, e.g. > /dev/null" if sys.stdout is None else None


def flags_problem() -> str | None:
    """What XLA does not know of XLA_FLAGS: it would end the process, with a message of C++."""
    given = os.environ.get(_FLAGS, "")
    if not given.strip() or os.environ.get(_CHECKED) == given:
        return None
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=_LONGEST_S)
    except (OSError, subprocess.TimeoutExpired):  # a machine that has other problems
        return None
    said = re.search(f"{_UNKNOWN}|{_WRONG}", done.stderr.decode(errors="replace"))
    if done.returncode == 0 or said is None:
        os.environ[_CHECKED] = given
        return None
    if said["unknown"]:
        return f"XLA_FLAGS has {said['unknown'].strip()}, which XLA does not know here: correct it, or leave it out"
    return f"XLA_FLAGS has --{said['flag']}={said['value']}, which is no value of it: correct it, or leave it out"
