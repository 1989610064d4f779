"""Can a run resume with fewer or more processes? python profiling/elastic.py [--steps N]

Trains a small dropless model for twice N steps, with a checkpoint in the middle. From there another number of processes
resumes: experts, optimizer state and batches are sharded differently. The restore compares the digest of each array
with that of the checkpoint; this program compares the losses of the second half. Writes results/elastic.json.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from count_argument import check_least
from results_file import rounded, write_result
from training_run import CONFIG, tiny

from moe_jax.checkpoint.files import FOLDER, check_files
from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.telemetry.run_log import read_metrics

CHANGES = ((4, 3), (4, 2), (2, 4), (8, 1))  # processes before and after
SIZE = 24  # sequences of a batch, and number of experts: all process counts divide it


class ElasticError(UserError):
    """Raised for a run that did not finish, or did not resume where it should."""


def main() -> None:
    """Train, resume with other numbers of processes, and write the result."""
    parser = CommandParser(prog="python profiling/elastic.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    check_least(arguments, steps=1)
    with tempfile.TemporaryDirectory() as home:
        for before in dict.fromkeys(before for before, _ in CHANGES):
            _train(Path(home) / str(before), before, arguments.steps)
        changes = [_changed(Path(home), before, after, arguments.steps) for before, after in CHANGES]
    write_result("elastic", {"steps_before": arguments.steps, "steps_after": arguments.steps, "changes": changes})


def _changed(home: Path, before: int, after: int, steps: int) -> dict[str, Any]:
    """Compare losses of `after` processes with those of the `before` that continued. Raises ElasticError."""
    same, other = home / str(before), home / f"{before}to{after}"
    shutil.copytree(same, other)
    shutil.rmtree(other / FOLDER / str(2 * steps))
    output = _train(other, after, steps)
    if f"resuming from step {steps}\n" not in output or "damaged" in output:
        raise ElasticError(f"{after} processes did not resume from step {steps} of {before}: {output[-300:]}")
    expected, losses = (_losses_after(folder, steps) for folder in (same, other))
    drifts = [abs(losses[step] - loss) / loss for step, loss in expected.items()]
    return {
        "before": before,
        "after": after,
        "arrays_with_equal_digests": len(check_files(other, steps).leaves),
        "largest_relative_drift": rounded(max(drifts)),
        "drift_of_first_step": rounded(drifts[0]),
    }


def _train(folder: Path, processes: int, steps: int) -> str:
    """Train to step 2 × steps, from the start or resumed; return the output. Raises ElasticError."""
    settings = [
        *tiny(processes, batch_size=SIZE, seq_len=64, experts=SIZE),
        *("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", f"log.dir={folder}"),
        *(f"train.steps={2 * steps}", f"checkpoint.every={steps}"),
    ]
    command = [sys.executable, "-m", "moe_jax.launch", f"--processes={processes}", "--retries=0"]
    done = subprocess.run(
        [*command, "--config", CONFIG, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},  # LLVM would take most of the time
    )
    if done.returncode:
        raise ElasticError(f"{processes} processes ended with exit code {done.returncode}: {done.stdout[-300:]}")
    print(f"{processes} processes have trained to step {2 * steps}", flush=True)
    return done.stdout


def _losses_after(folder: Path, step: int) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in read_metrics(folder) if "loss" in each and each["step"] > step}


if __name__ == "__main__":
    run_command(main)
