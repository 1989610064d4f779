"""Does expert migration speed up steps as predicted, in wall-clock time, on two processes in one box?

    sudo .venv/bin/python profiling/migration_box.py

Runs steps of a dropless model with a synthetic router that prefers the first experts. Steps with all experts in their
initial places alternate with steps where experts are placed as planned from the first step's load; the experts move in
between. The time that a step saves is predicted from the load ratios and the time of one block's experts at an even
load. The time of a move is predicted from the time in which each process sends one expert to the other. Both are
measured alone in the same round. Takes about 5 minutes, on an otherwise idle machine. Writes
results/migration_box.json.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import box
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from results_file import quartiles, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.models.moe import run_experts
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.rebalance.moves import Move
from moe_jax.rebalance.planner import RebalancePlan, plan
from moe_jax.rebalance.transfer import Mover
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import make_trainer

RANKS = 2
_COMMON = [
    *("mesh.data=1", f"mesh.expert={RANKS}", "model.num_layers=2", "model.moe.num_experts=16"),
    *("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "model.moe.gate=skewed_gate:choose"),
    *("exchange.reduction=all_reduce", "migration.enabled=true"),
]
_ALONE = 3  # repetitions of one block's experts by themselves in a round


class Harness:
    """One process's part of the training, and the placement of experts."""

    def __init__(self, config: Config):
        self.mesh = mesh = make_mesh(config.mesh)
        trainer = make_trainer(config, mesh)
        shape = (config.train.batch_size, config.data.seq_len + 1)
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
        self._batch = jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH_SPEC), lambda index: tokens[index])
        self._state = trainer.init()
        self._program = step_program(trainer, self._batch, target_here(trainer)).compile()
        self.mover = Mover(config, trainer)

    def seconds(self, steps: int) -> float:
        """Return mean seconds of `steps` consecutive steps, after a barrier with the other process."""
        return _together(lambda: self._steps(steps)) / steps

    def plans(self) -> list[RebalancePlan]:
        """Return the plan of each block, from the load of one more step."""
        self._steps(1)
        placement = jax.device_get(self._state["placement"])
        return [
            plan(load.tolist(), np.argsort(slots).tolist(), RANKS, None)
            for load, slots in zip(placement["load_ME"], placement["slot_ME"], strict=True)
        ]

    def move(self, moves_M: Sequence[Sequence[Move]], slot_ME: Any) -> float:
        """Make the moves, after which `slot_ME` is the placement of experts; return the seconds."""

        def run() -> None:
            self._state = jax.block_until_ready(self.mover.move(self._state, moves_M))

        seconds = _together(run)
        slots = self.mover.replicated(np.asarray(slot_ME, np.int32))
        self._state["placement"] = self._state["placement"] | {"slot_ME": slots}
        return seconds

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._state, metrics = self._program(self._state, self._batch)
            jax.block_until_ready(metrics)


def _sent_bytes() -> int:
    """Return the bytes that have left this process's namespace, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split()[0].startswith("eth"))


def _together(run: Callable[[], object]) -> float:
    multihost_utils.sync_global_devices("round")
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def experts_alone(config: Config) -> Callable[[], float]:
    """Return a function that times one block's experts on this device, forward and backward, at an even load."""
    model, moe = config.model, config.model.moe
    num_local = moe.num_experts // RANKS
    tokens = config.train.batch_size // RANKS * config.data.seq_len
    rng = np.random.default_rng(0)
    sizes = {"gate": (model.hidden_size, moe.intermediate_size), "up": (model.hidden_size, moe.intermediate_size)}
    sizes["down"] = (moe.intermediate_size, model.hidden_size)
    params = {name: rng.standard_normal((num_local, *size), np.float32) / 32 for name, size in sizes.items()}
    width = tokens * min(moe.top_k, num_local)  # rows from a source, enough for the worst case
    x_PWD = rng.standard_normal((RANKS, width, model.hidden_size), np.float32) / 32
    count_PL = np.full((RANKS, num_local), tokens * moe.top_k // moe.num_experts, np.int32)

    def passes(params: Any, x: jax.Array) -> Any:
        def experts(params: Any, x: jax.Array) -> jax.Array:
            return run_experts(params, ExpertRows(x, jnp.asarray(count_PL)), moe, GROUPED_PRODUCTS["cpu"]["blocks"])

        out, pull = jax.vjp(experts, params, x)
        return pull(out)

    program, inputs = jax.jit(passes).lower(params, x_PWD).compile(), jax.device_put((params, x_PWD))

    def run() -> None:
        for _ in range(_ALONE):
            jax.block_until_ready(program(*inputs))

    return lambda: _together(run) / _ALONE


def send_alone(mesh: jax.sharding.Mesh, num_bytes: int) -> Callable[[], float]:
    """Return a function that times how each process sends this much to the other, as cluster profiles do."""
    spec = PartitionSpec("expert")
    body = functools.partial(permuted, axes="expert", pairs=[(0, 1), (1, 0)])
    shape = jax.ShapeDtypeStruct((RANKS, num_bytes // 4), np.float32, sharding=NamedSharding(mesh, spec))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)).lower(shape).compile()
    x = jax.make_array_from_callback(shape.shape, shape.sharding, lambda _: np.ones((1, num_bytes // 4), np.float32))
    return lambda: _together(lambda: jax.block_until_ready(program(x)))


def measure(arguments: argparse.Namespace, config: Config) -> None:
    """Run all rounds, in one process of the box."""
    box.join()
    harness = Harness(config)
    (group,) = harness.mover.groups
    alone, send = experts_alone(config), send_alone(harness.mesh, harness.mover.expert_bytes(group))
    box.set_data_rate(box.parse_rate(arguments.rate))
    plans = harness.plans()
    there = [found.moves for found in plans]
    back = [tuple(reversed(moves)) for moves in there]
    first = np.tile(np.arange(config.model.moe.num_experts), (len(plans), 1))
    found: dict[str, list[float]] = {"uneven_s": [], "even_s": [], "experts_s": [], "move_s": [], "send_s": []}
    for round_index in range(arguments.rounds + 1):
        experts_s, uneven_s = alone(), harness.seconds(arguments.steps)
        before = _sent_bytes()
        move_s = harness.move(there, [np.argsort(found.expert_S) for found in plans])
        wire_bytes = _sent_bytes() - before
        even_step_s = harness.seconds(arguments.steps)
        harness.move(back, first)
        send_s = send()
        if round_index:  # round 0 is the warm-up
            for seconds, each in zip(found.values(), (uneven_s, even_step_s, experts_s, move_s, send_s), strict=True):
                seconds.append(each)
        if box.rank() == 0:
            print(
                f"round {round_index} of {arguments.rounds}: {uneven_s:.2f} s, {even_step_s:.2f} s a step", flush=True
            )
    cost = harness.mover.cost(there)
    box.return_values(
        found
        | {"ratios": [[found.ratio_before, found.ratio_after] for found in plans]}
        | {
            "swaps": [len(moves) for moves in there],
            "sends": cost.sends,
            "num_bytes": cost.num_bytes,
            "wire": wire_bytes,
        }
    )


def summary(found: dict[str, Any], bits_per_s: float) -> dict[str, Any]:
    """Summarise measured and predicted times."""
    rounds = list(zip(found["uneven_s"], found["even_s"], found["experts_s"], strict=True))
    unevenness = sum(before - after for before, after in found["ratios"])
    return {
        "rank_load_max_over_mean": [[rounded(x) for x in pair] for pair in found["ratios"]],
        "swaps": found["swaps"],
        "step_s": {name: quartiles(found[name]) for name in ("uneven_s", "even_s")},
        "experts_alone_s": quartiles(found["experts_s"]),
        "saved_s": quartiles([uneven_s - even_s for uneven_s, even_s, _ in rounds]),
        "saved_s_predicted": quartiles([unevenness * experts_s for *_, experts_s in rounds]),
        "speedup": quartiles([uneven_s / even_s for uneven_s, even_s, _ in rounds]),
        "speedup_predicted": quartiles([uneven_s / (uneven_s - unevenness * own_s) for uneven_s, _, own_s in rounds]),
        "move_s": quartiles(found["move_s"]),
        "move_s_predicted": quartiles([found["sends"] * send_s for send_s in found["send_s"]]),
        "move_s_at_the_links_rate": rounded(8 * found["num_bytes"] / bits_per_s),
        "bytes_of_a_device_predicted": found["num_bytes"],
        "bytes_on_the_wire": found["wire"],
    }


def main() -> None:
    """Run the box and write JSON to results/."""
    parser = CommandParser(prog="python profiling/migration_box.py", description=__doc__)
    arguments = box.parse_round_flags(parser, unit="half round", processes=[RANKS])
    rate = box.parse_rate(arguments.rate)
    config = load_config(arguments.config, _COMMON)
    if box.rank() is not None:
        measure(arguments, config)
        return
    settings = box.box_from(arguments)
    result = summary(box.run_in_box(settings), rate)
    write_result("migration_box", result | {"rate": arguments.rate, "box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
