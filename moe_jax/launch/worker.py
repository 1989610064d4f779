"""A worker: one process of a run, which its supervisor starts, watches and ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from moe_jax.distributed.heartbeat import NO_MESH, PIPE, STARTS
from moe_jax.launch.events import Events


def how_it_ended(code: int) -> str:
    """Describe an exit code of `subprocess`, where negative ones are signals."""
    return f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


class Worker:
    """One process, in a process group of its own so that it can be ended with all that it started."""

    def __init__(self, rank: int, arguments: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        self.rank = rank
        self.code = 0
        self.reached: int | None = None  # steps done, as it has reported
        self.has_no_mesh = False  # whether it has reported that no mesh fits the devices
        self._began_at: int | None = None  # the step at which it has begun
        self._num_reports = 0  # of steps
        self._reported_at = self._stopped_at = float("inf")  # times: of its last report; since when it is stopped
        self._errors: list[bytes] = []  # lines that are printed at the end
        read, write = os.pipe()
        first = rank == 0
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            env={**environ, PIPE: str(write)},
            pass_fds=[write],
            process_group=0,
        )
        os.close(write)
        self._reader = threading.Thread(target=self._forward_stderr, daemon=True)
        self._reader.start()
        self._listener = threading.Thread(target=self._listen, args=[read], daemon=True)
        self._listener.start()
        threading.Thread(target=self._wait, args=[events], daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started, if it still runs."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None:
        """Say how it hangs: it is stopped, or has begun no new step in time. None if not, or if it reports nothing."""
        now = time.monotonic()
        if now - self._stopped_at > progress_timeout_s:
            return f"stopped for {progress_timeout_s:g} s"
        started = self.reached != self._began_at
        limit_s = progress_timeout_s if started else start_timeout_s
        if now - self._reported_at > limit_s:
            after = "first step" if self.reached is None else f"step after {self.reached}"
            return f"no {after} for {limit_s:g} s"
        return None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it."""
        return self._stopped_at < float("inf")

    @property
    def has_begun_a_step(self) -> bool:
        """Whether it has begun a step since it was started. Its first report precedes that: it is where it begins."""
        return self._num_reports > 1

    def finish(self, print_errors: bool) -> None:
        """Read the rest of its output and print the rest of stderr, with or without the errors of bad input."""
        self._listener.join(timeout=1)
        self._reader.join(timeout=1)
        for line in self._errors if print_errors else []:
            self._print(line)

    def how_it_ended(self) -> str:
        return how_it_ended(self.code)

    def _wait(self, events: Events) -> None:
        while True:
            _, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WCONTINUED)
            if os.WIFSTOPPED(status):
                self._stopped_at = time.monotonic()
            elif os.WIFCONTINUED(status):
                self._stopped_at = float("inf")
            else:
                break
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # processes that it has started and not ended
        events.put((self.rank, self._process.returncode))

    def _listen(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._reported_at = time.monotonic()
                if line.strip() == NO_MESH:
                    self.has_no_mesh = True
                if line.strip() in (STARTS, NO_MESH):
                    continue
                step = int(line)
                if self.reached is None or step < self.reached:  # it has begun here, or has rolled back
                    self._began_at = step
                self._num_reports += 1
                self.reached = step
        self._reported_at = float("inf")  # it has closed the pipe: the rest is not timed

    def _forward_stderr(self) -> None:
        for line in self._process.stderr or []:
            if line.startswith(b"error: "):  # printed later, as every process may print the same
                self._errors.append(line)
            else:
                self._print(line)

    def _print(self, line: bytes) -> None:
        with suppress(OSError):  # the process would wait for a reader of its pipe
            sys.stderr.buffer.write(b"[rank %d] %s\n" % (self.rank, line.rstrip(b"\n")))
            sys.stderr.buffer.flush()
