"""Two processes that save checkpoints, some of which one of them cannot write, and then choose the newest together.

`saves.py FOLDER`: each process tells on stderr what it finds.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.checkpoint import files as checkpoint_files
from moe_jax.checkpoint.checksums import digest_program
from moe_jax.checkpoint.latest import agreed_newest
from moe_jax.checkpoint.save import Checkpoints
from moe_jax.checkpoint.storage import Storage
from moe_jax.distributed.processes import add_arguments, initialize, options_from
from moe_jax.telemetry.run_log import RunLog

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
add_arguments(parser)
arguments = parser.parse_args()
initialize(options_from(arguments), arguments.num_processes)
run, rank = arguments.folder, arguments.process_id
cut = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))


def state_of(step: int) -> dict[str, Any]:
    """Half of it is each process's."""
    numbers = np.random.default_rng(step).standard_normal((256, 256), np.float32)
    return {"w": jax.make_array_from_callback(numbers.shape, cut, lambda index: numbers[index])}


@contextmanager
def without_room(here: bool) -> Iterator[None]:
    """No file may grow beyond some kilobytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000 if here else soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


log = RunLog(run, start_step=0, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=rank > 0)
about: dict[str, Any] = {"config": {}, "mesh": {}, "versions": {}}
began = time.monotonic()
with log, Checkpoints(run, 2, log, digest_program(state_of(0)), about) as checkpoints:
    for step, fails_at in ((1, None), (2, 1), (3, 0), (4, None)):
        with without_room(rank == fails_at):
            checkpoints.save(step, state_of(step), data={})
            report(f"newest after step {step}: {checkpoints.newest()}")
assert time.monotonic() - began < 60, "processes waited for each other"

whole = checkpoint_files._check_arrays


def check_arrays(storage: Storage, step: int) -> None:
    if rank == 1 and step == 4:
        raise ValueError("a file is cut")
    whole(storage, step)


checkpoint_files._check_arrays = check_arrays
found: dict[int, str] = {}
report(f"newest: {agreed_newest(run, found)}, {found}")
