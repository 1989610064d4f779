"""How a process of many ends when it fails, or when another one did."""

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
from moe_jax.errors import EXIT_INTERRUPTED, EXIT_TRY_AGAIN, UserError, run_command

FAILURE_GRACE_S = 2  # that a failing process waits for the others to fail in the same way
CONSEQUENCE_DELAY_S = 0.5  # by which a process that failed because another one did ends after it
# What errors say that come of another process's end: those of gloo, NCCL, TCP, and jax's coordination service.
_OF_PEERS = (
    *("gloo", "nccl", "connection", "broken pipe", "heartbeat", "coordination", "barrier"),
    *("deadline_exceeded", "unavailable:", "aborted:", "timed out"),
)


@contextmanager
def fail_fast() -> Iterator[None]:
    """End this process soon after a failure of the body, with the failure's exit code, and before those it drags along.

    jax would close its connections, so that all others fail too, and then hold every process at its exit until the last
    has come: nobody could tell who was first, and a process that never comes would hold them for SHUTDOWN_TIMEOUT_S.
    """
    with ends_with_its_peers():
        try:
            yield
        except BaseException as error:
            if jax.distributed.is_initialized() and not is_of_a_peer(error):
                code = _exit_code(error)
                timer = threading.Timer(FAILURE_GRACE_S, _exit_now, [code])
                timer.daemon = True
                timer.start()
                atexit.register(_leave, code)  # runs before jax's own handler, which was registered earlier
            raise


@contextmanager
def ends_with_its_peers() -> Iterator[None]:
    """End this process with one line and EXIT_TRY_AGAIN when the body fails because another process has ended.

    Nothing around the body is left: saves under way would wait for the others.
    """
    try:
        yield
    except Exception as error:
        if jax.distributed.is_initialized() and is_of_a_peer(error):
            with suppress(OSError):
                print(_peer_failure(error), file=sys.stderr, flush=True)
            if is_supervised():  # by one who blames the first that ends
                time.sleep(CONSEQUENCE_DELAY_S)
            _exit_now(EXIT_TRY_AGAIN)
        raise


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error says that another process is gone, as far as errors of jax and of sockets tell."""
    if isinstance(error, ConnectionError):
        return not isinstance(error, BrokenPipeError)  # the reader of our output went away
    said = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and any(word in said for word in _OF_PEERS)


def run_and_leave(main: Callable[[], None]) -> NoReturn:
    """Run a command as `run_command` does, and end this process, whatever threads of libraries would keep it.

    Those of orbax do, after some errors. A process of many that fails ends by `fail_fast`.
    """
    try:
        run_command(main)
    except BaseException as error:
        if jax.distributed.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        _exit_now(_exit_code(error))
    leave()


def leave() -> NoReturn:
    """End this process, whose work is done, once all others have come here.

    Taking apart what Python and XLA hold would take seconds on a busy machine.
    """
    with suppress(jax.errors.JaxRuntimeError):  # of another process that has failed since
        jax.distributed.shutdown()
    _exit_now(0)


def _peer_failure(error: BaseException) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"PEER-FAILURE rank={jax.process_index()} step={steps_done()} cause={first_line}"


def _leave(code: int) -> None:
    jax.distributed.shutdown()  # returns when every process has come here; the timer does not wait as long
    time.sleep(CONSEQUENCE_DELAY_S)
    _exit_now(code)


def _exit_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # nobody reads it any more, or it was closed from the start
            stream.flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return 1
