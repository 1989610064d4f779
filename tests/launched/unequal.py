"""Two processes that were given different settings or data, or hold different replicas; each tells what it hears.

`unequal.py FOLDER`: names that begin with `own` are those of the process's own host.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.checkpoint.checksums import digest_program
from moe_jax.checkpoint.save import Checkpoints
from moe_jax.config.yaml_io import load_draft
from moe_jax.data.sources import open_tokens
from moe_jax.distributed.processes import add_arguments, initialize, options_from
from moe_jax.errors import UserError
from moe_jax.run.process_agreement import check_same_data, check_same_settings
from moe_jax.telemetry.run_log import RunLog

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
add_arguments(parser)
arguments = parser.parse_args()
initialize(options_from(arguments), arguments.num_processes)
folder, rank = arguments.folder, arguments.process_id
CONFIG = Path(__file__).parents[2] / "configs" / "shakespeare_cpu.yaml"
# what process 1 has instead
CASES = {
    "nothing else": [],
    "seed": ["train.seed=1"],
    "rate and batch": ["optimizer.learning_rate=3e-2", "train.batch_size=32"],
    "weight": ["model.moe.aux_loss_coeff=0.5"],
    "devices": ["mesh.cpu_devices=4"],
    "auto": ["mesh.data=auto"],
    "folder": ["log.dir=elsewhere"],
    "own host": ["data.prefetch=2", "data.path=own1/s.txt", "tune.cache=own1", "checkpoint.safety_copies_dir=/tmp"],
    "times": ["schedule.task_times=own1/times.json"],
}


def hear(case: str, check: Any, *given: Any) -> None:
    """Tell what a check says."""
    try:
        check(*given)
        reported = "as it should be"
    except UserError as error:
        reported = f"{error.exit_code} {error}"
    sys.stderr.write(f"{case}: {reported}\n")
    sys.stderr.flush()


for case, settings in CASES.items():
    hear(case, check_same_settings, load_draft(CONFIG, settings if rank == 1 else []))

text = Path(CONFIG.parent / "text" / "shakespeare.txt").read_bytes()[:20000]
for case, other in {"copies": text, "shorter": text[:-1], "a letter": text[:-1] + b"?"}.items():
    path = folder / f"own{rank}" / "s.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(other if rank == 1 else text)
    data = load_draft(CONFIG, [f"data.path={path}"]).data
    hear(f"data, {case}", check_same_data, open_tokens(data, 256))


def state_of(number: float) -> dict[str, Any]:
    """As this process alone has it."""
    values = np.full((4, 4), number, np.float32)
    everywhere = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec())
    return {"step": step_1, "w": jax.make_array_from_callback(values.shape, everywhere, lambda index: values[index])}


step_1 = jax.make_array_from_callback(
    (), NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec()), lambda index: np.int32(1)
)
log = RunLog(folder, start_step=0, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=rank > 0)
about: dict[str, Any] = {"config": {}, "mesh": {}, "versions": {}}
with log, Checkpoints(folder, 2, log, digest_program(state_of(0)), about) as checkpoints:
    for step, number in ((1, 0.5), (2, 0.5 + rank * 2**-24)):
        hear(f"step {step}", lambda: checkpoints.save(step, state_of(number), data={}))  # noqa: B023
