"""Are losses with fully sharded parameters those with whole ones? python profiling/sharded_losses.py [--only TEXT]

Trains a small model for 20 steps on each mesh on which tests compare a step with the reference, on simulated CPU
devices: `python -m moe_jax.train` with `optimizer.zero=0`, and with `optimizer.zero=3`. Seed and data are the same, so
losses differ only by the order of sums. Takes most of an hour of one core. Writes results/sharded_losses.json, and
prints the table of docs/fully_sharded.md; `--table` only prints it. Exit code 1 if a loss in float32 differs by more
than a ten thousandth. tests/test_sharded_losses.py compares the page with the results, and the meshes with those of the
tests.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_file import RESULTS, rounded, with_earlier, write_result
from training_run import CONFIG

from moe_jax.errors import CommandParser, ConfigError, UserError, run_command
from moe_jax.telemetry.run_log import read_metrics

NAME = "sharded_losses"
STEPS = 20
MOST = 1e-4  # relative difference in float32
MESHES = (
    "mesh.data=2 mesh.expert=2",
    "mesh.data=1 mesh.expert=4",
    "mesh.data=1 mesh.expert=2 mesh.tensor=2",
    "mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=sharded_chunked exchange.tensor_chunks=3",
    "mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=sharded_overlapped",
    "mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=sharded_scheduled",
    "mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=replicated",
    "mesh.data=1 mesh.expert=2 mesh.tensor=2 mesh.experts_over_tensor=true",
    "mesh.data=1 mesh.context=2 mesh.expert=2",
    "mesh.data=1 mesh.context=2 mesh.expert=2 mesh.experts_over_context=true",
    "mesh.data=1 mesh.context=2 mesh.tensor=2",
)
PIPELINES = {  # with the order of passes
    "mesh.data=1 mesh.pipeline=2 mesh.expert=2": "1f1b",
    "mesh.data=1 mesh.pipeline=2 mesh.context=2 mesh.experts_over_context=true "
    "exchange.context_form=all_gather": "1f1b",
    "mesh.data=1 mesh.pipeline=2 mesh.expert=2 mesh.tensor=2": "1f1b",
    "mesh.data=2 mesh.pipeline=4": "1f1b",
    "mesh.data=2 mesh.expert=2": "coscheduled",
}
STEPS_OF = {  # by the names of the table's columns
    "`vanilla`": ("schedule.policy=vanilla",),
    "`unified`": ("schedule.policy=unified", "schedule.microbatches=2"),
    "`unified`, bfloat16": ("schedule.policy=unified", "schedule.microbatches=2", "train.compute_dtype=bfloat16"),
}
IN_BFLOAT16 = ("data=2 expert=2", "expert=2 tensor=2", "context=2 expert=2", "pipeline=2 expert=2, 1f1b")
_MODEL = (
    *("model.hidden_size=64", "model.intermediate_size=128", "model.moe.intermediate_size=64", "data.seq_len=32"),
    *("train.batch_size=32", f"train.steps={STEPS}", "train.eval_every=0", "optimizer.warmup_steps=5"),
    *("checkpoint.every=0", "log.every=1", "log.tensorboard=false", "log.sample_tokens=0"),
)


class RunError(UserError):
    """Raised for a run that did not train to its last step."""


def cases() -> dict[str, dict[str, list[str]]]:
    """Return the settings of each step, by the table's rows and columns."""
    found: dict[str, dict[str, list[str]]] = {}
    for mesh, order in [*((mesh, None) for mesh in MESHES), *PIPELINES.items()]:
        row = re.sub(r"mesh\.data=1 |\b(mesh|exchange)\.", "", mesh) + (f", {order}" if order else "")
        devices = math.prod(map(int, re.findall(r"mesh\.\w+=(\d+)", mesh)))
        in_parts = (f"schedule.pipeline={order}", "train.grad_accumulation=4") if order else ()
        for column, own in STEPS_OF.items():
            needs_a_schedule = "sharded_scheduled" in mesh and "vanilla" in column
            if not needs_a_schedule and ("bfloat16" not in column or row in IN_BFLOAT16):
                settings = [*_MODEL, *mesh.split(), f"mesh.cpu_devices={devices}", *in_parts, *own]
                found.setdefault(row, {})[column] = settings
    return found


def losses(settings: list[str]) -> list[float]:
    """Train by the command line and return the loss of each step. Raises RunError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "moe_jax.train", "--config", CONFIG, *settings, f"log.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-500:]}")
        found = [record["loss"] for record in read_metrics(Path(folder)) if "loss" in record]
    if len(found) != STEPS:
        raise RunError(f"{' '.join(command)} recorded {len(found)} losses instead of {STEPS}")
    return found


def compared(settings: list[str]) -> dict[str, Any]:
    """Train with whole and with sharded parameters, and return by how much losses differ."""
    whole, sharded = (losses([*settings, f"optimizer.zero={stage}"]) for stage in (0, 3))
    difference = max(abs(one - other) / one for one, other in zip(whole, sharded, strict=True))
    print(f"{difference:.1e}: {' '.join(settings[len(_MODEL) :])}", flush=True)
    return {
        "largest_difference": rounded(difference),
        "equal_losses": sum(one == other for one, other in zip(whole, sharded, strict=True)),
        "first_loss": whole[0],
        "last_loss": whole[-1],
    }


def table(meshes: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return the lines of the table in docs/fully_sharded.md."""
    lines = [f"| mesh | {' | '.join(STEPS_OF)} |", "|---|---|---|---|"]
    return lines + [
        f"| {row} | {' | '.join(_cell(by_step.get(step)) for step in STEPS_OF)} |" for row, by_step in meshes.items()
    ]


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return "equal" if found["equal_losses"] == STEPS else f"{found['largest_difference']:.1e}"


def is_too_far(found: dict[str, Any], step: str) -> bool:
    """Return whether losses in float32 differ by more than orders of sums explain."""
    return "bfloat16" not in step and found["largest_difference"] > MOST


def main() -> None:
    """Train all, write the results and print the table, or only that of the last ones."""
    parser = CommandParser(prog="python profiling/sharded_losses.py", description=__doc__)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="meshes with this in their row; results of others stay"
    )
    arguments = parser.parse_args()
    chosen = {row: by_step for row, by_step in cases().items() if arguments.only in row}
    if not chosen:
        raise ConfigError(f"--only={arguments.only} is in no row: choose of {'; '.join(cases())}")
    if not arguments.table:
        found = {row: {step: compared(own) for step, own in by_step.items()} for row, by_step in chosen.items()}
        about = {"steps": STEPS, "settings": _MODEL}
        write_result(NAME, with_earlier(NAME, "meshes", found, about) if arguments.only else about | {"meshes": found})
    meshes = json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))["meshes"]
    print("\n".join(table(meshes)))
    if any(is_too_far(found, step) for by_step in meshes.values() for step, found in by_step.items()):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
