"""A launched run that is disturbed from outside: its processes, what it says and when, and its stretches."""

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
_GOING_ON = re.compile(r"(?:going on from|beginning at) step (\d+)(?:[:,] (.*))?")
_AGAIN = re.compile(r"launch: (.*): all start again|warning: (.*: going back to the checkpoint of step \d+)")
_DAMAGED = re.compile(r"warning: checkpoint \S+ is damaged \((.*)\): moved to ")
_NOT_SAVED = re.compile(r"warning: the checkpoint of step (\d+) was not saved")
_RANK = re.compile(r"--process-id (\d+)$")
_LAST_LINES = 12  # of what a run said, in errors
_LONGEST_WAIT_S = 600  # a busy machine takes minutes to compile


class ChaosError(UserError):
    """A run that did not come through."""


@dataclass
class Stretch:
    """Of training from a start, or from where the run went back to, and what it reached."""

    began_at: float
    reason: str  # that the run gave; empty: started by hand
    resumed: int = 0  # step
    told: str | None = None  # of what it goes on from, once it does
    damaged: str | None = None  # why a newer checkpoint was put aside
    first_step_at: float | None = None
    furthest: int | None = None  # step
    not_saved: list[int] = field(default_factory=list)  # steps


class DisturbedRun:
    """One command, given again whenever `start` is called."""

    def __init__(
        self, folder: Path, settings: Sequence[str], launcher: Sequence[str], disk: SmallDisk | None = None
    ) -> None:
        self.folder, self.disk = folder, disk
        self.faults = folder.parent / "faults"  # asked for
        self.faults.mkdir(exist_ok=True)
        self.stretches: list[Stretch] = []
        self._had_faults: set[int] = set()  # stretches
        self.said: list[str] = []
        self.strangers = Strangers()
        training = ["--config", CONFIG, f"log.dir={folder}", *settings]
        self._command = [sys.executable, "-m", "moe_jax.launch", *launcher, *training]
        self._alone = [sys.executable, "-m", "moe_jax.train", *training]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start, or go on."""
        self.stretches.append(Stretch(time.monotonic(), ""))
        kept = {PROGRAMS: str(self.folder.parent / "programs")}  # when the command is given again
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | kept | {faults.FOLDER: str(self.faults)},
        )
        self._reader = threading.Thread(target=self._listen, args=[self._process])
        self._reader.start()

    def wait(self, at_most_s: float | None = None) -> int | None:
        """Until it ends; its exit code, or None if it goes on."""
        assert self._process is not None
        try:
            code = self._process.wait(at_most_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join()
        return code

    def finish(self) -> None:
        """Until it ends well. Raises ChaosError."""
        if code := self.wait():
            raise self._error(f"the run ended with exit code {code}")

    def stop(self) -> None:
        """End what runs, if anything."""
        self.strangers.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self.wait()

    def second(self, at_most_s: float) -> tuple[int | None, str]:
        """Start the same training as one process; its exit code, None if it had to be killed, and its last line."""
        try:
            done = subprocess.run(self._alone, capture_output=True, text=True, errors="replace", timeout=at_most_s)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    @property
    def process_id(self) -> int:
        """Of the launcher."""
        assert self._process is not None
        return self._process.pid

    @property
    def step(self) -> int:
        """The last one told since it went on."""
        return self.stretches[-1].furthest or 0

    def wait_for(self, reached: Callable[[], bool], name: str) -> None:
        """Raises ChaosError if the run ends, or the time is over."""
        assert self._process is not None
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while not reached():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._error(f"waited in vain for {name}")
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Until a process has recorded that step, or a later one."""
        self.wait_for(lambda: self.step >= step, f"step {step}")

    def wait_for_checkpoints(self, count: int) -> list[int]:
        """The steps of all that are there, oldest first, once there are so many."""
        found: list[int] = []

        def enough() -> bool:
            found[:] = sorted(int(path.name) for path in (self.folder / FOLDER).glob("*") if path.name.isdigit())
            return len(found) >= count

        self.wait_for(enough, f"{count} checkpoints")
        return found

    def signal(self, number: signal.Signals, ranks: Sequence[int]) -> float:
        """Send it to some ranks; when. Raises ChaosError if there are none any more."""
        found: dict[int, int] = {}

        def all_there() -> bool:  # or it is between two generations
            found.clear()
            found.update(self.workers())
            return set(ranks) <= found.keys()

        self.wait_for(all_there, "processes to disturb")
        at = time.monotonic()
        for rank in ranks:
            with suppress(ProcessLookupError):  # the launcher was faster
                os.kill(found[rank], number)
        return at

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        assert self._process is not None
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self._process.pid)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return {int(found[1]): int(line.split()[0]) for line in lines if (found := _RANK.search(line))}

    def outcome(self, at: float) -> dict[str, Any]:
        """What came of a fault: when the next stretch began, its first new step, and what it did again.

        Nothing of one that hit a run which another had ended already.
        """
        index = max(i for i, each in enumerate(self.stretches) if each.began_at <= at)
        if index + 1 == len(self.stretches) or index in self._had_faults:
            return {}
        self._had_faults.add(index)
        hit, after = self.stretches[index : index + 2]
        values: dict[str, Any] = {"told": after.reason, "restart_s": rounded(after.began_at - at)}
        if after.damaged is not None:
            values["quarantined"] = after.damaged
        if after.first_step_at is not None:  # or a fault came before
            values["first_new_step_s"] = rounded(after.first_step_at - at)
        if hit.furthest is not None and after.furthest is not None:
            values |= {"step": hit.furthest, "steps_lost": hit.furthest - after.resumed}
            values["not_saved"] = [step for step in hit.not_saved if step > after.resumed]
        return values

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.said.append(line.strip())
                self._hear(line, time.monotonic())

    def _hear(self, line: str, now: float) -> None:
        stretch = self.stretches[-1]
        if found := _AGAIN.search(line):  # behind what a killed process left of a line
            self.stretches.append(Stretch(now, found[1] or found[2]))
        elif found := _GOING_ON.match(line):
            stretch.resumed, stretch.told = int(found[1]), found[2] or ""
        elif found := _DAMAGED.match(line):
            stretch.damaged = found[1]
        elif found := _NOT_SAVED.match(line):
            stretch.not_saved.append(int(found[1]))
        elif found := _STEP.match(line):
            stretch.furthest = int(found[1])
            stretch.first_step_at = stretch.first_step_at or now

    def _error(self, what: str) -> ChaosError:
        return ChaosError(f"{what}: {' | '.join(self.said[-_LAST_LINES:])}")
