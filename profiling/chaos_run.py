"""A launched run that is disturbed from outside: its processes, its output with times, and its stretches."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_disk import SmallDisk
from chaos_poke import Strangers
from results_file import rounded
from training_run import CONFIG

from moe_jax.checkpoint.files import FOLDER
from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.errors import UserError
from moe_jax.step import fault_injection as faults

_STEP = re.compile(r"step +(\d+)/")
_GOING_ON = re.compile(r"(?:resuming from|beginning at) step (\d+)(?:[:,] (.*))?")
_AGAIN = re.compile(r"launch: (.*): all start again|warning: (.*: going back to the checkpoint of step \d+)")
_DAMAGED = re.compile(r"warning: checkpoint \S+ is damaged \((.*)\): moved to ")
_NOT_SAVED = re.compile(r"warning: the checkpoint of step (\d+) was not saved")
_RANK = re.compile(r"--process-id (\d+)$")
_LAST_LINES = 12  # of a run's output, in error messages
_LONGEST_WAIT_S = 600  # a busy machine takes minutes to compile


class ChaosError(UserError):
    """Raised for a run that did not recover."""


@dataclass
class Stretch:
    """Training from a start, or from the checkpoint that the run rolled back to, until the next one."""

    began_at: float
    reason: str  # as the run printed it; empty if started by hand
    resumed: int = 0  # step
    source: str | None = None  # the checkpoint or copy that it resumes from, once printed
    damaged: str | None = None  # why a newer checkpoint was quarantined
    first_step_at: float | None = None
    furthest: int | None = None  # step
    not_saved: list[int] = field(default_factory=list)  # steps


class DisturbedRun:
    """One command, which is run again whenever `start` is called."""

    def __init__(
        self, folder: Path, settings: Sequence[str], launcher: Sequence[str], disk: SmallDisk | None = None
    ) -> None:
        self.folder, self.disk = folder, disk
        self.faults = folder.parent / "faults"  # requests to the run to inject faults
        self.faults.mkdir(exist_ok=True)
        self.stretches: list[Stretch] = []
        self._had_faults: set[int] = set()  # indices of stretches
        self.output: list[str] = []
        self.strangers = Strangers()
        training = ["--config", CONFIG, f"log.dir={folder}", *settings]
        self._command = [sys.executable, "-m", "moe_jax.launch", *launcher, *training]
        self._alone = [sys.executable, "-m", "moe_jax.train", *training]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the run, or resume it."""
        self.stretches.append(Stretch(time.monotonic(), ""))
        programs = {PROGRAMS: str(self.folder.parent / "programs")}  # shared by all starts of the command
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | programs | {faults.FOLDER: str(self.faults)},
        )
        self._reader = threading.Thread(target=self._read_output, args=[self._process])
        self._reader.start()

    def wait(self, at_most_s: float | None = None) -> int | None:
        """Wait until the run ends; return its exit code, or None if it is still running."""
        assert self._process is not None
        try:
            code = self._process.wait(at_most_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join()
        return code

    def finish(self) -> None:
        """Wait until the run ends successfully. Raises ChaosError."""
        if code := self.wait():
            raise self._error(f"the run ended with exit code {code}")

    def stop(self) -> None:
        """End the run if it is running."""
        self.strangers.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self.wait()

    def second(self, at_most_s: float) -> tuple[int | None, str]:
        """Start the same training as one process; return its exit code and its last line.

        The exit code is None if the process had to be killed.
        """
        try:
            done = subprocess.run(self._alone, capture_output=True, text=True, errors="replace", timeout=at_most_s)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    @property
    def process_id(self) -> int:
        """Process id of the launcher."""
        assert self._process is not None
        return self._process.pid

    @property
    def step(self) -> int:
        """The last step printed since the run resumed."""
        return self.stretches[-1].furthest or 0

    def wait_for(self, reached: Callable[[], bool], name: str) -> None:
        """Wait until `reached` returns true. Raises ChaosError if the run ends first, or on a timeout."""
        assert self._process is not None
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while not reached():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._error(f"waited in vain for {name}")
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Wait until a process has recorded this step, or a later one."""
        self.wait_for(lambda: self.step >= step, f"step {step}")

    def wait_for_checkpoints(self, count: int) -> list[int]:
        """Wait for this number of checkpoints; return the steps of all that exist, oldest first."""
        found: list[int] = []

        def enough() -> bool:
            found[:] = sorted(int(path.name) for path in (self.folder / FOLDER).glob("*") if path.name.isdigit())
            return len(found) >= count

        self.wait_for(enough, f"{count} checkpoints")
        return found

    def signal(self, number: signal.Signals, ranks: Sequence[int]) -> float:
        """Send a signal to some ranks and return the time. Raises ChaosError if they no longer exist."""
        found: dict[int, int] = {}

        def all_there() -> bool:  # otherwise the run is between two generations of processes
            found.clear()
            found.update(self.workers())
            return set(ranks) <= found.keys()

        self.wait_for(all_there, "processes to disturb")
        at = time.monotonic()
        for rank in ranks:
            with suppress(ProcessLookupError):  # the launcher ended it first
                os.kill(found[rank], number)
        return at

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        assert self._process is not None
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self._process.pid)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return {int(found[1]): int(line.split()[0]) for line in lines if (found := _RANK.search(line))}

    def outcome(self, at: float) -> dict[str, Any]:
        """Return what a fault caused: the next stretch's start, its first new step, and the number of repeated steps.

        Empty for a fault that hit a run which another fault had ended already.
        """
        index = max(i for i, each in enumerate(self.stretches) if each.began_at <= at)
        if index + 1 == len(self.stretches) or index in self._had_faults:
            return {}
        self._had_faults.add(index)
        hit, after = self.stretches[index : index + 2]
        values: dict[str, Any] = {"told": after.reason, "restart_s": rounded(after.began_at - at)}
        if after.damaged is not None:
            values["quarantined"] = after.damaged
        if after.first_step_at is not None:  # otherwise the next fault came before
            values["first_new_step_s"] = rounded(after.first_step_at - at)
        if hit.furthest is not None and after.furthest is not None:
            values |= {"step": hit.furthest, "steps_lost": hit.furthest - after.resumed}
            values["not_saved"] = [step for step in hit.not_saved if step > after.resumed]
        return values

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.output.append(line.strip())
                self._parse_line(line, time.monotonic())

    def _parse_line(self, line: str, now: float) -> None:
        stretch = self.stretches[-1]
        if found := _AGAIN.search(line):  # may follow the part of a line that a killed process left
            self.stretches.append(Stretch(now, found[1] or found[2]))
        elif found := _GOING_ON.match(line):
            stretch.resumed, stretch.source = int(found[1]), found[2] or ""
        elif found := _DAMAGED.match(line):
            stretch.damaged = found[1]
        elif found := _NOT_SAVED.match(line):
            stretch.not_saved.append(int(found[1]))
        elif found := _STEP.match(line):
            stretch.furthest = int(found[1])
            stretch.first_step_at = stretch.first_step_at or now

    def _error(self, what: str) -> ChaosError:
        return ChaosError(f"{what}: {' | '.join(self.output[-_LAST_LINES:])}")
