"""What does scheduling cost if there is nothing to overlap? python profiling/overhead.py [ROUNDS]

Runs steps of the plain program and of `policy=unified` with one microbatch, alternately, on two simulated devices. The
tasks are the same, but the scheduled program issues them one by one from explicit pullbacks. Takes about three minutes.
"""

import time
from typing import Any

import jax
import numpy as np
from count_argument import count_argument
from jax.sharding import NamedSharding
from results_file import quartiles, write_result

from moe_jax.config.yaml_io import load_config
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.step.trainer import Trainer, make_trainer

CONFIG = "configs/bench/box.yaml"
ROUNDS = 40
VARIANTS = {
    "plain": ["exchange.algorithm=flat"],
    "unified_1": ["exchange.algorithm=flat", "schedule.policy=unified", "schedule.microbatches=1"],
}


def seconds(trainer: Trainer, state: Any, batch: jax.Array) -> tuple[float, Any]:
    """Run one step; return its seconds and the state after it."""
    start = time.perf_counter()
    state = jax.block_until_ready(trainer.step(state, batch))[0]
    return time.perf_counter() - start, state


def main() -> None:
    """Measure and write results/overhead.json; with fewer rounds, overhead.quick.json."""
    rounds = count_argument("ROUNDS", ROUNDS, __doc__)
    initialize(Processes(mode="off"), 2)
    configs = {name: load_config(CONFIG, settings) for name, settings in VARIANTS.items()}
    config = configs["plain"]
    mesh = make_mesh(config.mesh)
    trainers = {name: make_trainer(each, mesh) for name, each in configs.items()}
    tokens = np.random.default_rng(0).integers(
        config.model.vocab_size, size=(config.train.batch_size, config.data.seq_len + 1), dtype=np.int32
    )
    batch = jax.device_put(tokens, NamedSharding(mesh, BATCH_SPEC))
    state = trainers["plain"].init()
    ratios = []
    for round_index in range(rounds + 2):
        found = {}
        order = list(trainers) if round_index % 2 else list(reversed(trainers))  # caches are warmer for the second
        for name in order:
            found[name], state = seconds(trainers[name], state, batch)
        if round_index >= 2:  # the first rounds compile
            ratios.append(found["unified_1"] / found["plain"])
    write_result("overhead", {"rounds": rounds, "unified_1_over_plain": quartiles(ratios)}, quick=rounds < ROUNDS)


if __name__ == "__main__":
    run_command(main)
