"""Do copies of each step's most loaded experts make a skewed router as fast as a balanced one?

    sudo .venv/bin/python profiling/hot_experts_box.py

Two processes run steps of a dropless model whose router prefers the first experts by a fixed law, without copies and
with copies (`exchange.hot_experts`), and steps of the same model with a router that prefers none. The three alternate.
The load of two ranks is at most twice the mean. Sequences are long, so that experts have many tokens for each weight,
as in large models: copies cost bytes by weight, and save compute by token. Takes about 6 minutes, on an otherwise idle
machine. Writes results/hot_experts_box.json.

    sudo .venv/bin/python profiling/hot_experts_box.py --processes 4

Four processes share two cores, each for a fixed share of the time, and a larger preference gives the busiest rank 2.4
times the mean load. Takes about 12 minutes. Writes results/hot_experts_box_4.json.

With --scheduled all steps have two microbatches, and exchanges and sums in the background: copies are sent while
attention computes. Writes results/hot_experts_box_scheduled.json or …_4_scheduled.json.
"""

import argparse
import dataclasses
import time
from typing import Any, NamedTuple

import box
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from results_file import quartiles, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import make_trainer

_COMMON = [
    *("mesh.data=1", "model.num_layers=2", "model.moe.num_experts=16", "model.moe.top_k=2"),
    *("model.hidden_size=256", "model.moe.intermediate_size=512", "data.seq_len=512"),
    *("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "exchange.reduction=all_reduce"),
]
_SCHEDULED = [
    *("schedule.policy=unified", "schedule.microbatches=2", "exchange.algorithm=background"),
    "exchange.reduction=background",
]
_SEQUENCES = 8  # of a rank
_SHARE = 0.45  # of a core for each of 4 processes


class Skew(NamedTuple):
    """A preference of routers, and how many copies even out the loads of that many ranks."""

    gate: str
    copies: int

    def variants(self) -> dict[str, list[str]]:
        """Return the settings of the steps that alternate."""
        skewed = [f"model.moe.gate=skewed_gate:{self.gate}"]
        return {
            "skewed": skewed,
            "copies": [*skewed, f"exchange.hot_experts={self.copies}"],
            "balanced": ["model.moe.gate=skewed_gate:choose_evenly"],
        }


SKEWS = {2: Skew("choose", 5), 4: Skew("choose_steeply", 5)}  # by number of processes


class Harness:
    """One process's part of the training of a variant."""

    def __init__(self, config: Config):
        mesh = make_mesh(config.mesh)
        trainer = make_trainer(config, mesh)
        shape = (config.train.batch_size, config.data.seq_len + 1)
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
        self._batch = jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH_SPEC), lambda index: tokens[index])
        self._state = trainer.init()
        self._program = step_program(trainer, self._batch, target_here(trainer)).compile()
        self._ranks, self._experts = config.mesh.expert, config.model.moe.num_experts
        self.load: list[float] = []  # of the busier rank / mean, by block, in the last step

    def seconds(self, steps: int) -> float:
        """Return mean seconds of `steps` consecutive steps, after a barrier with the other processes."""
        multihost_utils.sync_global_devices("round")
        start = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._program(self._state, self._batch)
            jax.block_until_ready(metrics)
        seconds = (time.perf_counter() - start) / steps
        load_MPL = np.asarray(metrics["expert_load"]).reshape(-1, self._ranks, self._experts // self._ranks)
        load_MP = load_MPL.sum(axis=2)
        self.load = (load_MP.max(axis=1) / load_MP.mean(axis=1)).tolist()
        return seconds


def measure(arguments: argparse.Namespace, configs: dict[str, Config]) -> None:
    """Run all rounds, in one process of the box."""
    box.join()
    harnesses = {name: Harness(config) for name, config in configs.items()}
    box.set_data_rate(box.parse_rate(arguments.rate))
    if arguments.processes == 4:
        box.set_share(_SHARE)
    found: dict[str, list[float]] = {name: [] for name in harnesses}
    for round_index in range(arguments.rounds + 1):
        times = {name: harness.seconds(arguments.steps) for name, harness in harnesses.items()}
        if round_index:  # round 0 is the warm-up
            for name, seconds in times.items():
                found[name].append(seconds)
        if box.rank() == 0:
            own = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
            print(f"round {round_index} of {arguments.rounds}: {own}", flush=True)
    box.return_values({"seconds": found, "load": {name: harness.load for name, harness in harnesses.items()}})


def summary(found: dict[str, Any], copies: int) -> dict[str, Any]:
    """Summarise the times: speeds are relative to the balanced router's, round by round."""
    seconds = found["seconds"]
    return {
        "copies": copies,
        "rank_load_max_over_mean_without_copies": {
            name: [rounded(x) for x in load] for name, load in found["load"].items()
        },
        "step_s": {name: quartiles(each) for name, each in seconds.items()},
        "speed_over_balanced": {
            name: quartiles([even / own for even, own in zip(seconds["balanced"], seconds[name], strict=True)])
            for name in ("skewed", "copies")
        },
    }


def main() -> None:
    """Run the box and write JSON to results/."""
    parser = CommandParser(prog="python profiling/hot_experts_box.py", description=__doc__)
    parser.add_argument("--scheduled", action="store_true", help="steps of the unified policy in the background")
    arguments = box.parse_round_flags(parser, unit="variant and round", processes=list(SKEWS))
    skew, ranks = SKEWS[arguments.processes], arguments.processes
    common = [*_COMMON, f"mesh.expert={ranks}", f"train.batch_size={ranks * _SEQUENCES}"]
    common += _SCHEDULED if arguments.scheduled else []
    configs = {name: load_config(arguments.config, [*common, *own]) for name, own in skew.variants().items()}
    if box.rank() is not None:
        measure(arguments, configs)
        return
    settings = box.box_from(arguments, limits_cpu=ranks == 4)
    result = summary(box.run_in_box(settings), skew.copies)
    name = "hot_experts_box" if ranks == 2 else f"hot_experts_box_{ranks}"
    name += "_scheduled" if arguments.scheduled else ""
    write_result(name, result | {"rate": arguments.rate, "box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
