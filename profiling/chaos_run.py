"""A launched run that is disturbed from outside: its processes, what it says and when, and its generations."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_file import rounded
from training_run import CONFIG

from moe_jax.errors import UserError
from moe_jax.train.progress import PROGRAMS

_STEP = re.compile(r"step +(\d+)/")
_GOING_ON = re.compile(r"going on from step (\d+)")
_AGAIN = re.compile(r"launch: (.*): all start again")
_RANK = re.compile(r"--process-id (\d+)$")


class ChaosError(UserError):
    """A run that did not come through."""


@dataclass
class Generation:
    """Processes that were started together, and what they reached."""

    began_at: float
    reason: str  # that the launcher gave; empty: started by hand
    resumed: int = 0  # step
    first_step_at: float | None = None
    furthest: int | None = None  # step


class DisturbedRun:
    """One command, given again whenever `start` is called."""

    def __init__(self, folder: Path, settings: Sequence[str], launcher: Sequence[str]) -> None:
        self.folder = folder
        self.generations: list[Generation] = []
        command = [sys.executable, "-m", "moe_jax.launch", *launcher, "--config", CONFIG, f"log.dir={folder}"]
        self._command = [*command, *settings, "log.sample_tokens=0"]
        self._said: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start, or go on."""
        self.generations.append(Generation(time.monotonic(), ""))
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, PROGRAMS: str(self.folder.parent)},  # kept when the command is given again
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
        code = self.wait()
        if code:
            raise ChaosError(f"the run ended with exit code {code}: {' | '.join(self._said[-5:])}")

    def stop(self) -> None:
        """End what runs, if anything."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self.wait()

    def wait_for_step(self, step: int) -> None:
        """Until a process has recorded that step, or all have ended."""
        assert self._process is not None
        while self._process.poll() is None and (self.generations[-1].furthest or 0) < step:
            time.sleep(0.02)

    def hit(self, kind: signal.Signals, ranks: Sequence[int]) -> float:
        """Send a signal to some ranks; when. Raises ChaosError if there are none any more."""
        deadline = time.monotonic() + 10
        while not set(ranks) <= (found := self._workers()).keys():  # between two generations
            if time.monotonic() > deadline:
                raise ChaosError(f"there are no processes to disturb: {' | '.join(self._said[-5:])}")
            time.sleep(0.02)
        at = time.monotonic()
        for rank in ranks:
            os.kill(found[rank], kind)
        return at

    def outcome(self, at: float) -> dict[str, Any]:
        """What came of a fault: when the next generation began, its first new step, and what it did again."""
        index = max(i for i, each in enumerate(self.generations) if each.began_at <= at)
        if index + 1 == len(self.generations):
            return {}
        hit, after = self.generations[index : index + 2]
        values: dict[str, Any] = {"told": after.reason, "restart_s": rounded(after.began_at - at)}
        if after.first_step_at is not None:  # or a fault came before
            values["first_new_step_s"] = rounded(after.first_step_at - at)
        if hit.furthest is not None and after.furthest is not None:
            values |= {"step": hit.furthest, "steps_lost": hit.furthest - after.resumed}
        return values

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or []:
            now = time.monotonic()
            self._said.append(line.strip())
            generation = self.generations[-1]
            if found := _AGAIN.match(line):
                self.generations.append(Generation(now, found[1]))
            elif found := _GOING_ON.match(line):
                generation.resumed = int(found[1])
            elif found := _STEP.match(line):
                generation.furthest = int(found[1])
                generation.first_step_at = generation.first_step_at or now

    def _workers(self) -> dict[int, int]:
        """Process ids by rank."""
        assert self._process is not None
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self._process.pid)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return {int(found[1]): int(line.split()[0]) for line in lines if (found := _RANK.search(line))}
