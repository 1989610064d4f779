"""What tensor ranks gain if they do not exchange the same rows, in wall-clock time, on two nodes in one box.

    sudo .venv/bin/python profiling/tensor_box.py

Two processes in network namespaces are two nodes, joined by a throttled link; each has up to four simulated devices,
its tensor ranks. Training steps with each form of exchange (`exchange.tensor_form`) alternate; times are ratios to
`replicated`, where every tensor rank exchanges all rows. All forms start from the same state and process the same
tokens: their losses have to be equal bit for bit. Writes results/tensor_box.json; exit code 1 if they are not.
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import box
import jax
import numpy as np
from count_argument import check_least
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from results_file import quartiles, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.traffic import bytes_sent
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.parallel.tensor_dispatch import FORMS
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import make_trainer

NODES, TENSOR_RANKS = 2, (2, 4)
BASE = "replicated"
_COMMON = ["exchange.algorithm=flat", "exchange.reduction=all_reduce", "mesh.data=1", f"mesh.expert={NODES}"]
_SMALLER = ["model.num_layers=2", "train.batch_size=8"]


class Harness:
    """The step of one config on the first tensor ranks of both nodes, its state, and its losses so far."""

    def __init__(self, config: Config):
        each = len(jax.devices()) // NODES
        devices = [d for node in range(NODES) for d in jax.devices()[node * each :][: config.mesh.tensor]]
        mesh = make_mesh(config.mesh, devices)
        trainer = make_trainer(config, mesh)
        shape = (config.train.batch_size, config.data.seq_len + 1)
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
        self._batch = jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH_SPEC), lambda index: tokens[index])
        self._state = trainer.init()
        self._program = step_program(trainer, self._batch, target_here(trainer)).compile()
        self.exchanged_bytes = bytes_sent(parse(self._program.as_text() or ""), "all-to-all", mesh.size)
        self.losses: list[float] = []

    def seconds(self, steps: int) -> float:
        """Return mean seconds of `steps` consecutive steps, after a barrier with the other node."""
        multihost_utils.sync_global_devices("round")
        start = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._program(self._state, self._batch)
            self.losses.append(float(metrics["loss"]))
        return (time.perf_counter() - start) / steps


def measure(arguments: argparse.Namespace) -> None:
    """Run all rounds, in one process of the box."""
    box.join(devices=max(TENSOR_RANKS))
    harnesses = {
        (tensor, form): Harness(
            load_config(
                arguments.config, [*_COMMON, *_SMALLER, f"mesh.tensor={tensor}", f"exchange.tensor_form={form}"]
            )
        )
        for tensor in TENSOR_RANKS
        for form in FORMS
    }
    box.set_rate(box.parse_rate(arguments.rate))
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in harnesses}
    for round_index in range(arguments.rounds + 1):
        for key, harness in harnesses.items():
            step_s = harness.seconds(arguments.steps)
            if round_index:  # round 0 is the warm-up
                seconds[key].append(step_s)
        if box.rank() == 0:
            print(f"round {round_index} of {arguments.rounds}", flush=True)
    box.return_values(
        [[*key, seconds[key], harness.exchanged_bytes, harness.losses] for key, harness in harnesses.items()]
    )


def summary(found: list[Any]) -> dict[str, Any]:
    """Return the bytes of each form, and its time relative to `replicated` in the same round."""
    rows = {(tensor, form): rest for tensor, form, *rest in found}
    result: dict[str, Any] = {}
    for (tensor, form), (seconds, num_bytes, losses) in rows.items():
        base_s, base_bytes, base_losses = rows[tensor, BASE]
        ratios = [own / base for own, base in zip(seconds, base_s, strict=True)]
        result.setdefault(f"{tensor} tensor ranks", {})[form] = {
            "all_to_all_bytes_of_a_device": num_bytes,
            "bytes_over_replicated": num_bytes / base_bytes,
            "step_s": round(statistics.median(seconds), 3),
            "time_over_replicated": quartiles(ratios),
            "same_losses": losses == base_losses,
        }
    return result


def main() -> None:
    """Run the box and write JSON to results/."""
    parser = CommandParser(prog="python profiling/tensor_box.py", description=__doc__)
    box.add_round_flags(parser, rate="400mbit", out_of="node", unit="form in a round", rounds=7)
    box.add_arguments(parser)
    # a device that waits for another one occupies a thread
    parser.set_defaults(processes=NODES, threads=2 * max(TENSOR_RANKS))
    arguments = parser.parse_args()
    check_least(arguments, steps=1, rounds=2)
    if arguments.processes != NODES:
        raise ConfigError(f"--processes={arguments.processes}: this needs {NODES} nodes, leave it out")
    box.parse_rate(arguments.rate)
    if box.rank() is not None:
        measure(arguments)
        return
    settings = box.box_from(arguments)
    result = summary(box.run_in_box(settings))
    write_result("tensor_box", {"forms": result, "rate": arguments.rate, "box": dataclasses.asdict(settings)})
    if not all(form["same_losses"] for forms in result.values() for form in forms.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
