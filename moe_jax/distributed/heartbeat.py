"""What a process tells its supervisor, through a pipe that it inherited: how far it has come. Imports no jax."""

import os
import sys
from contextlib import suppress

from moe_jax.errors import EXIT_TRY_AGAIN

# environment variables that a supervisor sets
PIPE = "MOE_JAX_PROGRESS_PIPE"  # the pipe's descriptor
PROGRAMS = "MOE_JAX_PROGRAMS"  # a folder for compiled programs

STARTS = "starts"  # instead of a step
NO_MESH = "no mesh"  # the same

SAME_SIGNAL_S = 1  # in which signals are one request: a batch system may send it to a launcher and its processes

_pipe: int | None = None
_reached = 0


def tell_start() -> None:
    """Tell that this process will tell its progress: it is timed from now on."""
    _tell(STARTS)


def tell_no_mesh() -> None:
    """Tell that so many devices can form no mesh."""
    _tell(NO_MESH)


def tell_progress(step: int) -> None:
    """Tell that `step` steps are done and the run goes on. The first call, before compiling, says where it begins.

    Ends the process if its supervisor is gone: a second run might be started in the same folder.
    """
    global _reached
    _reached = step
    _tell(str(step))


def _tell(text: str) -> None:
    global _pipe
    if PIPE in os.environ:
        _pipe = int(os.environ.pop(PIPE))  # what this process starts does not inherit it
    if _pipe is not None:
        try:
            os.write(_pipe, f"{text}\n".encode())
        except BrokenPipeError:
            with suppress(OSError):  # it may have been who reads this
                print(f"the launcher is gone: ended behind step {_reached}", file=sys.stderr, flush=True)
            os._exit(EXIT_TRY_AGAIN)


def is_supervised() -> bool:
    """Whether somebody hears of the progress, once some was told."""
    return _pipe is not None


def end_of_progress() -> None:
    """Tell that no step comes any more: what is left is not timed."""
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = None


def steps_done() -> int:
    """As last told."""
    return _reached
