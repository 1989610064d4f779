"""`python -m moe_jax.launch --processes N …`: train with N processes on this machine, supervised.

What is not a flag of the launcher goes to every process. Process 0 has the terminal; what the others write to stderr
is passed on behind their rank. When one fails, or the launcher is told to stop, none stays behind.
"""

import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from moe_jax.errors import EXIT_BAD_INPUT, CommandParser, UserError, run_command

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Events = queue.SimpleQueue[tuple[int, int]]  # (rank, exit code), or (-1, signal that the launcher received)


class LaunchError(UserError):
    """Processes that cannot be started."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit as the first process that fails does. Raises LaunchError."""
    parser = CommandParser(
        prog="python -m moe_jax.launch",
        description="Start N processes of one run on this machine. All other arguments go to each of them.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many to start")
    parser.add_argument("--port", type=int, metavar="P", help="where they meet on 127.0.0.1 (default: a free one)")
    parser.add_argument("--module", default="moe_jax.train", help="what each of them runs (default: %(default)s)")
    parser.add_argument(
        "--grace", type=float, default=10, metavar="SECONDS", help="left to end in (default: %(default)s)"
    )
    arguments, command = parser.parse_known_args(argv)
    if arguments.processes < 1:
        raise LaunchError(f"--processes={arguments.processes} must be at least 1")
    if arguments.port is not None and not 0 < arguments.port < 2**16:
        raise LaunchError(f"--port={arguments.port} must be 1..65535")
    if not arguments.grace >= 0:
        raise LaunchError(f"--grace={arguments.grace:g} must be 0 seconds or more")
    if not _exists(arguments.module):
        raise LaunchError(f"--module={arguments.module} is not found: name what python -m can run, e.g. moe_jax.train")
    sys.exit(
        launch(
            arguments.module,
            arguments.processes,
            arguments.port or free_port(),
            command[1:] if command[:1] == ["--"] else command,
            arguments.grace,
        )
    )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of the package that it should be in; an empty name
        return False


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch(module: str, num_processes: int, port: int, command: Sequence[str], grace_s: float) -> int:
    """Run `module` in processes that meet at `port`; 0, or the exit code of the first one that failed.

    After a failure the others have `grace_s` seconds to end by themselves, and as long after SIGTERM; then they are
    killed.
    """
    events: Events = queue.SimpleQueue()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda received, _: events.put((-1, received)))
    ranks: list[_Rank] = []
    try:
        for rank in range(num_processes):
            meeting = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(num_processes)]
            arguments = [sys.executable, "-m", module, *command, *meeting, "--process-id", str(rank)]
            ranks.append(_Rank(rank, arguments, events))
        failed, stopped_by = _supervise(ranks, events, grace_s)
    finally:
        for process in ranks:
            process.send(signal.SIGKILL)
    everywhere = all(process.code == EXIT_BAD_INPUT for process in ranks)
    for process in ranks:
        process.finish(tell_errors=not everywhere)  # rank 0 has told it for all
    if failed is not None:
        if not everywhere:
            print(f"launch: rank {failed.rank} failed first, {_how(failed.code)}", file=sys.stderr)
        return failed.code if failed.code > 0 else 128 - failed.code
    if stopped_by and any(process.code for process in ranks):
        print(f"launch: stopped by {signal.Signals(stopped_by).name}", file=sys.stderr)
        return 128 + stopped_by
    return 0


def _supervise(ranks: Sequence["_Rank"], events: Events, grace_s: float) -> tuple["_Rank | None", int]:
    """Wait until all have ended; the first that failed by itself, and the signal that stopped the launcher, or 0."""
    running = set(range(len(ranks)))
    failed, stopped_by, deadline = None, 0, float("inf")
    steps = [signal.SIGTERM, signal.SIGKILL]  # what those that run at the deadline get
    while running:
        try:  # not for ever: a signal that comes just before a wait does not end it
            rank, value = events.get(timeout=min(1, max(0, deadline - time.monotonic())))
        except queue.Empty:
            if time.monotonic() < deadline:
                continue
            rank, value = -1, 0
        if rank >= 0:
            running.remove(rank)
            ranks[rank].code = value
            if value and failed is None and not stopped_by:
                failed, deadline = ranks[rank], time.monotonic() + grace_s
        elif value == 0 or not stopped_by:
            stopped_by = stopped_by or value
            step = steps.pop(0) if len(steps) > 1 else steps[0]
            for other in running:
                ranks[other].send(step)
            deadline = time.monotonic() + grace_s
    return failed, stopped_by


class _Rank:
    """One process, in a process group of its own so that it can be ended with all that it started."""

    def __init__(self, rank: int, arguments: Sequence[str], events: Events) -> None:
        self.rank = rank
        self.code = 0
        self._errors: list[bytes] = []
        first = rank == 0
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            env={"JAX_LOCAL_DEVICE_IDS": str(rank), **os.environ},  # on a machine with GPUs: one for each process
            process_group=0,
        )
        self._reader = threading.Thread(target=self._pass_on_stderr, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=[events], daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def finish(self, tell_errors: bool) -> None:
        """Pass on what is left of stderr, with or without the errors of bad input."""
        self._reader.join(timeout=1)
        for line in self._errors if tell_errors else []:
            self._print(line)

    def _wait(self, events: Events) -> None:
        code = self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever it left behind
        events.put((self.rank, code))

    def _pass_on_stderr(self) -> None:
        for line in self._process.stderr or []:
            if line.startswith(b"error: "):  # kept, for it may be what every process says
                self._errors.append(line)
            else:
                self._print(line)

    def _print(self, line: bytes) -> None:
        sys.stderr.buffer.write(b"[rank %d] %s\n" % (self.rank, line.rstrip(b"\n")))
        sys.stderr.buffer.flush()


def _how(code: int) -> str:
    return f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    run_command(main)
