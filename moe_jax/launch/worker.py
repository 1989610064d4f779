"""One process of a run, seen from its supervisor: started, listened to, watched, ended."""

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
    """An exit code as `subprocess` has it, in words."""
    return f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


class Worker:
    """One process, in a process group of its own so that it can be ended with all that it started."""

    def __init__(self, rank: int, arguments: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        self.rank = rank
        self.code = 0
        self.reached: int | None = None  # steps done, as it told
        self.has_no_mesh = False  # as it told
        self._began_at: int | None = None
        self._told = 0  # times
        self._heard = self._stopped = float("inf")  # when it last told its progress; since when it is stopped
        self._errors: list[bytes] = []
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
        self._reader = threading.Thread(target=self._pass_on_stderr, daemon=True)
        self._reader.start()
        self._listener = threading.Thread(target=self._listen, args=[read], daemon=True)
        self._listener.start()
        threading.Thread(target=self._wait, args=[events], daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None:
        """How it hangs: it is stopped, or reaches no new step. One that tells nothing is not timed."""
        now = time.monotonic()
        if now - self._stopped > progress_timeout_s:
            return f"stopped for {progress_timeout_s:g} s"
        started = self.reached != self._began_at
        limit_s = progress_timeout_s if started else start_timeout_s
        if now - self._heard > limit_s:
            after = "first step" if self.reached is None else f"step after {self.reached}"
            return f"no {after} for {limit_s:g} s"
        return None

    @property
    def is_stopped(self) -> bool:
        return self._stopped < float("inf")

    @property
    def has_begun_a_step(self) -> bool:
        """Since it was started: what it tells first is where it begins."""
        return self._told > 1

    def finish(self, tell_errors: bool) -> None:
        """Hear the rest: pass on what is left of stderr, with or without the errors of bad input."""
        self._listener.join(timeout=1)
        self._reader.join(timeout=1)
        for line in self._errors if tell_errors else []:
            self._print(line)

    def how_it_ended(self) -> str:
        return how_it_ended(self.code)

    def _wait(self, events: Events) -> None:
        while True:
            _, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WCONTINUED)
            if os.WIFSTOPPED(status):
                self._stopped = time.monotonic()
            elif os.WIFCONTINUED(status):
                self._stopped = float("inf")
            else:
                break
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever it left behind
        events.put((self.rank, self._process.returncode))

    def _listen(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._heard = time.monotonic()
                if line.strip() == NO_MESH:
                    self.has_no_mesh = True
                if line.strip() in (STARTS, NO_MESH):
                    continue
                step = int(line)
                if self.reached is None or step < self.reached:  # it begins here, or has gone back
                    self._began_at = step
                self._told += 1
                self.reached = step
        self._heard = float("inf")  # it has closed the pipe: the rest is not training

    def _pass_on_stderr(self) -> None:
        for line in self._process.stderr or []:
            if line.startswith(b"error: "):  # kept, for it may be what every process says
                self._errors.append(line)
            else:
                self._print(line)

    def _print(self, line: bytes) -> None:
        sys.stderr.buffer.write(b"[rank %d] %s\n" % (self.rank, line.rstrip(b"\n")))
        sys.stderr.buffer.flush()
