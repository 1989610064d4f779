"""What does the loss of nodes cost with safety copies? python profiling/node_loss.py [--losses N] [--processes P]

Trains a small model under the launcher twice: undisturbed, and with safety copies behind every step, while nodes are
lost again and again. Each process is a node: it is killed, and what it has in memory is removed. By turns one is lost,
and one with the next, which holds its copies. Compares all losses bit for bit, and writes results/node_loss.json.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from count_argument import check_least
from results_file import quartiles, rounded, write_result
from training_run import CONFIG

from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.train.metrics import FILE_NAME, read_metrics
from moe_jax.train.progress import PROGRAMS

STEPS_PER_LOSS = 15
CHECKPOINT_EVERY = 5
LONGEST_WAIT_S = 900
_ENDED = re.compile(r"^launch: .*: all start again", re.MULTILINE)
_GOING_ON = re.compile(r"^(?:going on from|beginning at) step (\d+)[:,] (.*)$", re.MULTILINE)
_STEP = re.compile(r"^step +(\d+)/", re.MULTILINE)
_RANK = re.compile(r"--process-id (\d+)$")


class NodeLossError(UserError):
    """A run that did not come through."""


def main() -> None:
    """Train both and write the result."""
    parser = CommandParser(prog=f"python profiling/{Path(sys.argv[0]).name}", description=__doc__)
    parser.add_argument("--losses", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=4, metavar="P", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and times (default: %(default)s)")
    arguments = parser.parse_args()
    check_least(arguments, losses=1, processes=2)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.environ[PROGRAMS] = f"{home}/programs"
        expected = _losses(_trained(Path(home) / "undisturbed", arguments, []))
        safe = ["checkpoint.safety_copies_every=1", f"checkpoint.safety_copies_dir={memory}"]
        with _Run(Path(home) / "disturbed", arguments, safe) as run:
            lost = _lose(run, Path(memory), arguments)
            run.finish()
        records = read_metrics(run.folder)
    one, two = ([each for each in lost if len(each["ranks"]) == count] for count in (1, 2))
    values = {
        "processes": arguments.processes,
        "seed": arguments.seed,
        "checkpoint_every": CHECKPOINT_EVERY,
        "steps": len(expected),
        "losses_equal_bit_for_bit": _losses(records) == expected,
        "steps_lost_with_one_node": [each["steps_lost"] for each in one],
        "steps_lost_with_a_node_and_the_next": [each["steps_lost"] for each in two],
        "safety_s": quartiles([record["safety_s"] for record in records if "safety_s" in record]),
        "step_s": quartiles([record["step_s"] for record in records if "step_s" in record]),
        "lost": lost,
    }
    write_result("node_loss", values)


class _Run:
    """A launched training. A context: leaving it ends what still runs."""

    def __init__(self, folder: Path, arguments: Namespace, settings: Sequence[str]) -> None:
        self.folder, ranks = folder, arguments.processes
        settings = [
            *("model.num_layers=2", "model.d_model=64", "model.hidden_dim=128", "model.moe.hidden_dim=64"),
            *(f"mesh.cpu_devices={ranks}", "mesh.data=1", f"mesh.expert={ranks}", f"model.moe.num_experts={2 * ranks}"),
            *(f"train.batch_size={2 * ranks}", "data.seq_len=128", "train.compute_dtype=float32"),
            *(f"train.steps={STEPS_PER_LOSS * (arguments.losses + 1)}", "train.eval_every=0", f"log.dir={folder}"),
            *(f"checkpoint.every={CHECKPOINT_EVERY}", "log.every=1", "log.tensorboard=false", "log.sample_tokens=0"),
            *settings,
        ]
        launcher = [f"--processes={ranks}", f"--retries={arguments.losses}", "--start-timeout=1800"]
        command = [sys.executable, "-m", "moe_jax.launch", *launcher, "--config", CONFIG, *settings]
        folder.mkdir()
        self._output = (folder / "output").open("w")
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._output.close()

    def finish(self) -> None:
        """Raises NodeLossError unless it ends well."""
        if code := self._process.wait():
            raise NodeLossError(f"the run ended with exit code {code}: {' | '.join(self.said.splitlines()[-5:])}")

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    @property
    def recorded(self) -> int:
        """The last step in its records."""
        lines = (self.folder / FILE_NAME).read_text().splitlines()
        return max(json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}"))

    @property
    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self._process.pid)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return {int(found[1]): int(line.split()[0]) for line in lines if (found := _RANK.search(line))}

    def await_step(self, step: int) -> None:
        """Of the generation that runs. Raises NodeLossError if it takes too long."""

        def steps() -> list[str]:
            return _STEP.findall(_GOING_ON.split(self.said)[-1])

        self._await(lambda: int((steps() or ["0"])[-1]) >= step, f"step {step}")

    def await_end(self, times: int) -> int:
        """Of all processes for the n-th time; the last step recorded. Raises NodeLossError if it takes too long."""
        self._await(lambda: len(_ENDED.findall(self.said)) == times, "another start")
        return self.recorded

    def await_going_on(self, times: int) -> tuple[int, str]:
        """At which step, and from what. Raises NodeLossError if it takes too long."""
        self._await(lambda: len(_GOING_ON.findall(self.said)) == times, "going on")
        step, told = _GOING_ON.findall(self.said)[-1]
        return int(step), told

    def _await(self, reached: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not reached():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NodeLossError(f"{name} was not reached: {' | '.join(self.said.splitlines()[-5:])}")
            time.sleep(0.02)


def _trained(folder: Path, arguments: Namespace, settings: Sequence[str]) -> list[dict[str, Any]]:
    with _Run(folder, arguments, settings) as run:
        run.finish()
    return read_metrics(folder)


def _lose(run: _Run, memory: Path, arguments: Namespace) -> list[dict[str, Any]]:
    """Lose nodes until it is enough; what came of it, in order."""
    rng = random.Random(arguments.seed)
    lost: list[dict[str, Any]] = []
    while len(lost) < arguments.losses:
        run.await_step((lost[-1]["resumed"] if lost else 0) + rng.randint(6, STEPS_PER_LOSS - 1))
        time.sleep(rng.uniform(0, 0.5))
        first = rng.randrange(arguments.processes)
        ranks = [first] if len(lost) % 2 == 0 else [first, (first + 1) % arguments.processes]
        found, at = run.workers, time.monotonic()
        for rank in ranks:
            with suppress(ProcessLookupError):  # the launcher was faster
                os.kill(found[rank], signal.SIGKILL)
        for rank in ranks:
            shutil.rmtree(next(memory.glob(f"*/node-{rank}")))
        reached = run.await_end(len(lost) + 1)  # records of steps that are done again will be gone
        resumed, told = run.await_going_on(len(lost) + 1)
        lost.append({"ranks": ranks, "reached": reached, "resumed": resumed, "steps_lost": reached - resumed})
        lost[-1] |= {"told": told, "going_on_s": rounded(time.monotonic() - at)}
        print(f"{len(lost)}: lost {ranks} at step {reached}, going on from step {resumed}: {told}", flush=True)
    return lost


def _losses(records: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


if __name__ == "__main__":
    run_command(main)
