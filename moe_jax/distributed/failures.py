"""How one of several processes exits when it fails, or when another one has failed."""

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import jax

from moe_jax.distributed.heartbeat import is_supervised, steps_done
from moe_jax.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    UserError,
    first_line,
    is_bad_path,
    run_command,
)
from moe_jax.files.local_copy import remove_copies

FAILURE_GRACE_S = 2  # for which a failing process waits for others that fail in the same way
CONSEQUENCE_DELAY_S = 0.5  # by which a process that failed because another one did exits later than that one
# words in errors caused by the end of another process: those of gloo, NCCL, TCP, and jax's coordination service
_PEER_WORDS = (
    *("gloo", "nccl", "connection", "broken pipe", "heartbeat", "coordination", "barrier"),
    *("deadline_exceeded", "unavailable:", "aborted:", "timed out"),
)


@contextmanager
def fail_fast() -> Iterator[None]:
    """Exit soon after the body has failed, with the failure's exit code, and before processes that fail in consequence.

    jax would close its connections, so that all others fail too, and then block every process at its exit until the
    last one exits: nobody could see which failed first, and one that hangs would block all for SHUTDOWN_TIMEOUT_S.
    """
    with exit_with_peers():
        try:
            yield
        except BaseException as error:
            if jax.distributed.is_initialized() and not is_peer_error(error):
                code = _exit_code(error)
                timer = threading.Timer(FAILURE_GRACE_S, _exit_now, [code])
                timer.daemon = True
                timer.start()
                atexit.register(_shut_down, code)  # runs before jax's own handler, which was registered earlier
            raise


@contextmanager
def exit_with_peers() -> Iterator[None]:
    """Exit with one line on stderr and EXIT_TRY_AGAIN if the body fails because another process has ended.

    Context managers around the body are not exited: saves in progress would wait for the other processes.
    """
    try:
        yield
    except Exception as error:
        if jax.distributed.is_initialized() and is_peer_error(error):
            with suppress(OSError):
                print(_peer_failure(error), file=sys.stderr, flush=True)
            if is_supervised():  # the supervisor blames the first process that exits
                time.sleep(CONSEQUENCE_DELAY_S)
            _exit_now(EXIT_TRY_AGAIN)
        raise


def is_peer_error(error: BaseException) -> bool:
    """Whether an error means that another process is gone, judged by its type and message."""
    if isinstance(error, ConnectionError):
        return not isinstance(error, BrokenPipeError)  # the reader of this process's output is gone
    message = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and any(word in message for word in _PEER_WORDS)


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run a command with `run_command` and exit, even if threads of libraries are still running.

    Those of orbax do, after some errors. If one of several processes fails, `fail_fast` lets it exit.
    """
    try:
        run_command(main)
    except BaseException as error:
        if jax.distributed.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        _exit_now(_exit_code(error))
    _exit_with_all()


def _exit_with_all() -> NoReturn:
    """Exit with code 0, once all other processes have reached this point.

    It skips the shutdown of Python and XLA, which would take seconds on a busy machine.
    """
    with suppress(jax.errors.JaxRuntimeError):  # raised if another process has failed since
        jax.distributed.shutdown()
    _exit_now(0)


def _peer_failure(error: BaseException) -> str:
    return f"PEER-FAILURE rank={jax.process_index()} step={steps_done()} cause={first_line(error)}"


def _shut_down(code: int) -> None:
    jax.distributed.shutdown()  # returns when all processes have called it, or the timer of `fail_fast` ends this one
    time.sleep(CONSEQUENCE_DELAY_S)
    _exit_now(code)


def _exit_now(code: int) -> NoReturn:
    remove_copies()  # handlers of `atexit` are skipped
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # its reader is gone, or it was closed from the start
            stream.flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, OSError) and is_bad_path(error):
        return EXIT_BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return 1
