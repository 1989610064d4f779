"""Parts of a benchmark, each in its own process, which frees its memory at its end. A failure is reported in a line."""

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Values = dict[str, Any]
Put = Callable[[Values], None]  # stores the results so far
_LINES = 16  # of a traceback, in the results
_END_S = 10.0  # time for a part to end after it has sent all results


def run_part(module: str, arguments: Values, limit_s: float, keep: Put) -> Values:
    """Run `module.measure(put, **arguments)` and return what it put, with `failed` if it did not succeed in `limit_s`.

    `keep` gets all results so far whenever new ones arrive.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, module, arguments))
    start = time.monotonic()
    process.start()
    sender.close()  # only the child's end stays open: when it is closed as well, nothing more comes
    found: Values = {}
    try:
        while receiver.poll(max(0.0, start + limit_s - time.monotonic())):
            found |= receiver.recv()
            keep(found)
        found["failed"] = f"did not end within {limit_s:.0f} s"
    except EOFError:
        process.join(_END_S)
        if process.exitcode:
            found.setdefault("failed", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    found["wall_s"] = round(time.monotonic() - start, 1)
    keep(found)
    return found


def _measure(sender: Connection, module: str, arguments: Values) -> None:
    try:
        importlib.import_module(module).measure(sender.send, **arguments)
    except Exception as error:
        sender.send({"failed": one_line(error), "traceback": traceback.format_exc().splitlines()[-_LINES:]})


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"[:300].removesuffix(": ")
