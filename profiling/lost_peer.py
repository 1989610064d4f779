"""How soon does a process notice that its peer is gone? sudo .venv/bin/python profiling/lost_peer.py

Two processes in network namespaces (box.py) train a small model, without a launcher. One of them is killed or stopped,
or its link goes down, for some seconds or permanently; the other one ends by itself or continues. Then both are started
again with the same command. At the end, losses are compared with those of an undisturbed run. Writes
results/lost_peer.json.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import box
from results_file import rounded, write_result
from training_run import CONFIG, tiny

from moe_jax.distributed.processes import HEARTBEAT_TIMEOUT_S
from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.telemetry.run_log import FILE_NAME, read_metrics

PROCESSES = 2
CHECKPOINT_EVERY = 20
STEPS_BETWEEN = 10  # least number of steps between faults
SHORT_CUT_S = 10.0  # shorter than the timeout of a heartbeat
LONGEST_S = 240.0  # time limit of every wait
PORT = 8476


class LostPeerError(UserError):
    """Raised for a run that did not finish."""


class Pair:
    """Two processes of one run, each in its own namespace."""

    def __init__(self, names: Sequence[str], folder: Path, steps: int) -> None:
        self.names, self.folder = names, folder
        small = tiny(PROCESSES, batch_size=4, seq_len=128, experts=8)
        self._settings = [*small, f"train.steps={steps}", f"checkpoint.every={CHECKPOINT_EVERY}"]
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start the run, or resume it."""
        self.folder.mkdir(exist_ok=True)
        self.processes = []
        for rank, name in enumerate(self.names):
            meeting = ["--coordinator", f"{box.address(0)}:{PORT}", "--num-processes", str(PROCESSES)]
            command = [sys.executable, "-m", "moe_jax.train", "--config", CONFIG, f"log.dir={self.folder}"]
            with (self.folder / f"output-{rank}").open("w") as output:
                whole = [*box.inside(name), *command, *self._settings, *meeting, "--process-id", str(rank)]
                self.processes.append(subprocess.Popen(whole, stdout=output, stderr=output, text=True))

    def step(self) -> int:
        """The last recorded step."""
        records = read_metrics(self.folder) if (self.folder / FILE_NAME).exists() else []
        return records[-1]["step"] if records else 0

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Wait for a condition; return whether it was met within the time limit."""
        deadline = time.monotonic() + LONGEST_S
        while not reached():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def wait_for_step(self, step: int) -> None:
        """Wait for a recorded step. Raises LostPeerError if a process ends first."""
        if not self.wait_for(lambda: self.step() >= step or any(each.poll() is not None for each in self.processes)):
            raise LostPeerError(f"step {step} was not reached in {LONGEST_S:g} s")
        if self.step() < step:
            raise LostPeerError(f"a process ended before step {step}: {self.last_line(0)} | {self.last_line(1)}")

    def last_line(self, rank: int) -> str:
        """Return the last non-empty line that a process printed."""
        lines = (self.folder / f"output-{rank}").read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()


def _link(pair: Pair, rank: int, state: str) -> None:
    subprocess.run(["ip", "-n", pair.names[rank], "link", "set", box.LINK, state], check=True)


def _lost(pair: Pair, how: str, rank: int) -> dict[str, Any]:
    """Remove one process permanently; return how soon and how each other one ended, and its last line."""
    at = time.monotonic()
    if how == "cut":
        _link(pair, rank, "down")
    else:
        pair.processes[rank].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    left = [other for other in range(PROCESSES) if how == "cut" or other != rank]
    ended: dict[str, Any] = {}

    def all_ended() -> bool:
        for each in left:
            code = pair.processes[each].poll()
            if code is not None and str(each) not in ended:
                seconds = rounded(time.monotonic() - at)
                ended[str(each)] = {"seconds": seconds, "exit_code": code, "said": pair.last_line(each)}
        return len(ended) == len(left)

    pair.wait_for(all_ended)
    pair.kill()
    if how == "cut":
        _link(pair, rank, "up")
    return {"how": how, "rank": rank, "others_ended": ended}


def _cut_for_some_seconds(pair: Pair, rank: int) -> dict[str, Any]:
    """Take the link of one process down for some seconds; return the time from then to the next step."""
    _link(pair, rank, "down")
    time.sleep(SHORT_CUT_S)
    step, at = pair.step(), time.monotonic()
    _link(pair, rank, "up")
    pair.wait_for_step(step + 2)
    return {"how": f"cut for {SHORT_CUT_S:g} s", "rank": rank, "next_step_s": rounded(time.monotonic() - at)}


def _disturbed(pair: Pair) -> list[dict[str, Any]]:
    """Inject all faults; return the outcome of each."""
    found, reached = [], 0
    for how in ("cut for some seconds", "killed", "stopped", "cut"):
        for rank in range(PROCESSES):
            if not any(each.poll() is None for each in pair.processes):
                pair.start()
            pair.wait_for_step(reached + STEPS_BETWEEN)
            short = how.startswith("cut for")
            found.append(_cut_for_some_seconds(pair, rank) if short else _lost(pair, how, rank))
            reached = max(reached, pair.step())
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Disturb, compare, and write the result."""
    parser = CommandParser(prog="python profiling/lost_peer.py", description=__doc__)
    parser.parse_args()
    box.check_possible()
    with tempfile.TemporaryDirectory() as home, box.namespaces(box.Box(processes=PROCESSES, cores=(0,))) as names:
        pair = Pair(names, Path(home) / "disturbed", 10**6)
        try:
            found = _disturbed(pair)
            equal = _ends_equal(pair, Path(home) / "undisturbed", pair.step() + STEPS_BETWEEN)
        finally:
            pair.kill()
    write_result(
        "lost_peer",
        {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "losses_equal_bit_for_bit": equal, "faults": found},
    )


def _ends_equal(pair: Pair, undisturbed: Path, steps: int) -> bool:
    """Return whether both runs have the same losses at the end."""
    runs = [Pair(pair.names, folder, steps) for folder in (pair.folder, undisturbed)]
    for run in runs:
        run.start()
        if not run.wait_for(lambda run=run: all(each.poll() is not None for each in run.processes)):  # type: ignore[misc]
            run.kill()
        if any(each.returncode for each in run.processes):
            raise LostPeerError(f"a process of the last run failed: {run.last_line(0)} | {run.last_line(1)}")
    disturbed, expected = (
        [(each["step"], each["loss"]) for each in read_metrics(run.folder) if "loss" in each] for run in runs
    )
    return disturbed == expected


if __name__ == "__main__":
    run_command(main)
