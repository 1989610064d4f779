"""What does migration of experts do to the load of ranks, and what does it cost? python profiling/migration.py [STEPS]

Trains a small dropless model of 64 experts on 8 simulated ranks, with a synthetic router that prefers the first
experts, without migration and with it at its default settings; batches, seed and optimizer are the same. Compares all
losses bit for bit, seconds of steps with and without an expert placement, and the bytes of the compiled move with the
predicted ones. Takes about 5 minutes.
"""

import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from count_argument import count_argument
from results_file import quartiles, rounded, write_result
from training_run import records_of, train_config

from moe_jax.config import Config
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.rebalance.transfer import Mover
from moe_jax.step.trainer import make_trainer

RANKS = 8
SETTINGS = [
    *("model.num_layers=2", "model.hidden_size=128", "model.moe.num_experts=64", "model.moe.intermediate_size=128"),
    *("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "model.moe.gate=skewed_gate:choose"),
    *(f"mesh.cpu_devices={RANKS}", "mesh.data=1", f"mesh.expert={RANKS}", "data.seq_len=64", "train.batch_size=16"),
    *("optimizer.warmup_steps=20", "train.compute_dtype=float32", "log.every=1"),
]
ON = ["migration.enabled=true"]
_ROUNDS, _STEPS = 15, 10  # for the comparison of step times
_CURVES = ("loss", "grad_norm", "load_balance_loss", "validation_loss")


def main() -> None:
    """Train both runs and write results/migration.json."""
    steps = count_argument("STEPS", 250, __doc__)
    initialize(Processes(mode="off"), RANKS)
    settings = [*SETTINGS, f"train.eval_every={steps}"]
    plain, migrating = records_of(settings, steps), records_of([*settings, *ON], steps)
    looks = [record for record in migrating if "rank_load" in record]
    moves = [record for record in looks if "migrated_blocks" in record]
    config = train_config([*settings, *ON], steps)
    values: dict[str, Any] = {
        "settings": [*settings, *ON],
        "migration": {name: getattr(config.migration, name) for name in ("every", "threshold", "patience")}
        | {"payback_steps": config.migration.payback_steps},
        "rank_load_max_over_mean": {record["step"]: [rounded(x) for x in record["rank_load"]] for record in looks},
        "curves": {name: len(_curve(plain, name)) for name in _CURVES},
        "curves_equal_bit_for_bit": all(_curve(plain, name) == _curve(migrating, name) for name in _CURVES),
        "moves": [{name: value for name, value in record.items() if name != "tokens"} for record in moves],
        **_overhead(migrating, looks),
        "step_on_over_off": quartiles(_ratios(*(train_config(each, steps) for each in ([*settings, *ON], settings)))),
        **_bytes(config, moves),
    }
    write_result("migration", values)


def _curve(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


def _seconds(records: list[dict[str, Any]]) -> list[float]:
    return [record["step_s"] for record in records if "step_s" in record and record["step"] > 1]


def _overhead(records: list[dict[str, Any]], looks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the time of load checks and moves, as a share of the time of all steps."""
    look_s, step_s = math.fsum(record["look_s"] for record in looks), math.fsum(_seconds(records))
    return {"looks_s": rounded(look_s), "steps_s": rounded(step_s), "overhead": rounded(look_s / step_s)}


def _ratios(*configs: Config) -> list[float]:
    """Return the ratios of seconds of the first config's steps to the second's, which alternate; nothing moves."""
    runs = [_steps_of(config) for config in configs]
    rounds = [[run() for run in runs] for _ in range(1 + _ROUNDS)][1:]  # the first round is the warm-up
    return [first / second for first, second in rounds]


def _steps_of(config: Config) -> Callable[[], float]:
    """Return a function that runs some steps and returns their seconds."""
    trainer = make_trainer(config, make_mesh(config.mesh))
    state, shape = trainer.init(), (config.train.batch_size, config.data.seq_len + 1)
    batch = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(_STEPS):
            state, metrics = trainer.step(state, batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start

    return run


def _bytes(config: Config, moves: list[dict[str, Any]]) -> dict[str, Any]:
    """Return bytes of the collectives in a move's compiled program, and predicted bytes of an expert and the moves."""
    mesh = make_mesh(config.mesh)
    mover = Mover(config, make_trainer(config, mesh))
    (group,) = mover.groups
    text = mover.lowered(group).compile().as_text() or ""
    collectives = re.findall(r"= (\w+)\[(\d+)\]\S* (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    sent = sorted({4 * int(size) for _, size, _ in collectives})
    return {
        "collectives_of_a_move": sorted({kind for _, _, kind in collectives}),
        "bytes_of_each": sent,
        "expert_bytes_predicted": mover.expert_bytes(group),
        "bytes_moved_predicted": [record["migration_bytes"] for record in moves],
        "sends": [record["migration_bytes"] // mover.expert_bytes(group) for record in moves],
    }


if __name__ == "__main__":
    run_command(main)
