"""Parts of a benchmark, each in a process of its own: what it held is free afterwards, and what fails is one line."""

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Values = dict[str, Any]
Put = Callable[[Values], None]  # hands over what is known so far
_LINES = 16  # of a traceback, in the results
_END_S = 10.0  # that a part has to end when it has told everything


def run_part(module: str, arguments: Values, limit_s: float, keep: Put) -> Values:
    """What `module.measure(put, **arguments)` put, with `failed` if it did not end well within so many seconds.

    `keep` gets everything that is known so far whenever something comes.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, module, arguments))
    start = time.monotonic()
    process.start()
    sender.close()  # the child's end alone is left: when that is closed, too, nothing more comes
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
    """The kind of an error and the first line of what it says."""
    told = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {told}"[:300].removesuffix(": ")
