"""What does the loss of nodes cost with safety copies? python profiling/node_loss.py [--losses N] [--processes P]

Trains a small model under the launcher twice: undisturbed, and with safety copies after every step while nodes are lost
again and again. Each process is a node: it is killed, and its data in memory are deleted. Losses alternate between one
node, and a node together with the next one, which stores its copies. Compares all training losses bit for bit, and
writes results/node_loss.json.
"""

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from chaos_run import DisturbedRun
from count_argument import check_least
from results_file import quartiles, rounded, write_result
from training_run import tiny

from moe_jax.errors import CommandParser, run_command
from moe_jax.telemetry.run_log import FILE_NAME, read_metrics

STEPS_PER_LOSS = 15
CHECKPOINT_EVERY = 5


def main() -> None:
    """Train both runs and write the result."""
    parser = CommandParser(prog=f"python profiling/{Path(sys.argv[0]).name}", description=__doc__)
    parser.add_argument("--losses", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=4, metavar="P", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and times (default: %(default)s)")
    arguments = parser.parse_args()
    check_least(arguments, losses=1, processes=2)
    with ExitStack() as stack:
        home, memory = (Path(stack.enter_context(tempfile.TemporaryDirectory(dir=at))) for at in (None, "/dev/shm"))
        quiet = _run(home / "undisturbed", arguments, [])
        run = _run(
            home / "disturbed",
            arguments,
            ["checkpoint.safety_copies_every=1", f"checkpoint.safety_copies_dir={memory}"],
        )
        for each in (quiet, run):
            stack.callback(each.stop)
        quiet.start()
        quiet.finish()
        run.start()
        lost = _lose(run, memory, arguments)
        run.finish()
        expected, records = _losses(read_metrics(quiet.folder)), read_metrics(run.folder)
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


def _run(folder: Path, arguments: Namespace, settings: Sequence[str]) -> DisturbedRun:
    size, steps = 2 * arguments.processes, STEPS_PER_LOSS * (arguments.losses + 1)
    small = tiny(arguments.processes, batch_size=size, seq_len=128, experts=size)
    launcher = [f"--processes={arguments.processes}", f"--retries={arguments.losses}", "--start-timeout=1800"]
    return DisturbedRun(
        folder, [*small, f"train.steps={steps}", f"checkpoint.every={CHECKPOINT_EVERY}", *settings], launcher
    )


def _lose(run: DisturbedRun, memory: Path, arguments: Namespace) -> list[dict[str, Any]]:
    """Lose nodes, as often as asked for; return the outcomes in order."""
    rng = random.Random(arguments.seed)
    lost: list[dict[str, Any]] = []
    while len(lost) < arguments.losses:
        run.wait_for_step(run.stretches[-1].resumed + rng.randint(6, STEPS_PER_LOSS - 1))
        time.sleep(rng.uniform(0, 0.5))
        first, stretches = rng.randrange(arguments.processes), len(run.stretches)
        ranks = [first] if len(lost) % 2 == 0 else [first, (first + 1) % arguments.processes]
        at = run.signal(signal.SIGKILL, ranks)
        for rank in ranks:
            shutil.rmtree(next(memory.glob(f"*/node-{rank}")))
        run.wait_for(partial(_has_more, run, stretches), "another start")
        reached = _recorded(run)  # the records of repeated steps are removed
        run.wait_for(lambda: run.stretches[-1].source is not None, "resuming")
        resumed, source = run.stretches[-1].resumed, run.stretches[-1].source
        lost.append({"ranks": ranks, "reached": reached, "resumed": resumed, "steps_lost": reached - resumed})
        lost[-1] |= {"told": source, "going_on_s": rounded(time.monotonic() - at)}
        print(f"{len(lost)}: lost {ranks} at step {reached}, resuming from step {resumed}: {source}", flush=True)
    return lost


def _has_more(run: DisturbedRun, stretches: int) -> bool:
    return len(run.stretches) > stretches


def _recorded(run: DisturbedRun) -> int:
    """Return the last step in the run's records."""
    lines = (run.folder / FILE_NAME).read_text().splitlines()
    return max(json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}"))


def _losses(records: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


if __name__ == "__main__":
    run_command(main)
