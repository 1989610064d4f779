"""Progress reports from a process to its supervisor, through a pipe that it inherited. Imports no jax."""

import os
import sys
from contextlib import suppress

from moe_jax.errors import EXIT_TRY_AGAIN

# environment variables that a supervisor sets
PIPE = "MOE_JAX_PROGRESS_PIPE"  # the file descriptor of the pipe
PROGRAMS = "MOE_JAX_PROGRAMS"  # a folder that caches compiled programs

# lines that are sent instead of a number of steps
STARTS = "starts"
NO_MESH = "no mesh"

SAME_SIGNAL_S = 1  # signals within this time are one request: a batch system may signal a launcher and its processes

_pipe: int | None = None
_steps_done = 0


def report_start() -> None:
    """Report that this process will report its progress: from now on, the supervisor times it."""
    _report(STARTS)


def report_no_mesh() -> None:
    """Report that no mesh fits the number of devices."""
    _report(NO_MESH)


def report_progress(step: int) -> None:
    """Report that `step` steps are done and the run continues. The first call, before compiling, is where it begins.

    It ends the process if its supervisor is gone, as another run might be started in the same folder.
    """
    global _steps_done
    _steps_done = step
    _report(str(step))


def _report(text: str) -> None:
    global _pipe
    if PIPE in os.environ:
        _pipe = int(os.environ.pop(PIPE))  # processes that this one starts do not inherit it
    if _pipe is not None:
        try:
            os.write(_pipe, f"{text}\n".encode())
        except BrokenPipeError:
            with suppress(OSError):  # the launcher may also have read stderr
                print(f"the launcher is gone: ended after step {_steps_done}", file=sys.stderr, flush=True)
            os._exit(EXIT_TRY_AGAIN)


def is_supervised() -> bool:
    """Whether a supervisor receives the progress. True only after the first report."""
    return _pipe is not None


def end_progress() -> None:
    """Report that no more steps follow: the supervisor does not time the rest."""
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = None


def steps_done() -> int:
    """Return the number of steps that was reported last."""
    return _steps_done
