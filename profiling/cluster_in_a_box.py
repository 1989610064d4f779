"""Training steps on a throttled cluster in one box.

    sudo .venv/bin/python profiling/cluster_in_a_box.py [section.key=value …]

Processes in network namespaces run the project's own step on XLA:CPU, each on one core, with collectives that run in
the background (`exchange.algorithm=background`). How long tasks take is measured first, and schedules are made by that.
All variants are compiled at the start and then run in turn, a few steps of each in every round, so that ratios compare
neighbours in time. In the same rounds: compute alone (the steps with local stand-ins for their collectives) and
communication alone (the collectives of the plain step, one after another). No schedule can be faster than the longer
of the two. Gradients are summed in the background, too. Variants with `flat` use XLA's own collectives; they run only
if named in `--variants`, and need `--threads 2` to hide anything.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import box
import jax
import numpy as np
from box_picture import write_picture, write_timelines
from box_summary import COMMUNICATION, COMPUTE, summary, table
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.stages import Compiled
from results_file import RESULTS, write_result
from stand_ins import collectives_of, communication, without_communication

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import ConfigError, run_command
from moe_jax.measure.trace import Operation, read_trace, seconds_by_op
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.measured import OPS, write_times
from moe_jax.train.step import make_trainer

_PIPELINE = ["schedule.policy=expert_pipeline", "schedule.microbatches=2"]
_UNIFIED = ["schedule.policy=unified", "schedule.microbatches=2"]
_GREEDY = ["schedule.weight_grad=greedy"]
_CHUNKED = ["schedule.grad_reduce=chunked", "schedule.chunk_mb=2"]
_FLAT = ["exchange.algorithm=flat", "exchange.reduction=all_reduce"]  # XLA's own
# name: settings. The first two are what the others are compared with.
VARIANTS: dict[str, list[str]] = {
    "vanilla": [],
    "expert_pipeline": _PIPELINE,
    "unified": _UNIFIED,
    "unified+weight_grad": _UNIFIED + _GREEDY,
    "unified+grad_reduce": _UNIFIED + _CHUNKED,
    "unified+weight_grad+grad_reduce": _UNIFIED + _GREEDY + _CHUNKED,
    "unified+weight_grad+block": [*_UNIFIED, *_GREEDY, "schedule.grad_reduce=block"],
    "unified+weight_grad+grad_reduce+4_microbatches": [*_UNIFIED, *_GREEDY, *_CHUNKED, "schedule.microbatches=4"],
    "expert_pipeline+4_parts": [*_PIPELINE, "schedule.microbatches=4"],
    "expert_pipeline+weight_grad+grad_reduce": _PIPELINE + _GREEDY + _CHUNKED,
    "vanilla+weight_grad+grad_reduce": _GREEDY + _CHUNKED,
    "vanilla+flat": _FLAT,
    "expert_pipeline+flat": _PIPELINE + _FLAT,
    "unified+flat": _UNIFIED + _FLAT,
}
_WITHOUT_COMMUNICATION = ("vanilla", "unified")  # the second shows what cutting the batch costs
_TRACES = 3  # that task times are the median of
_PROBE_RATE = 400e6  # bit/s at which `--rate auto` measures communication first

Step = Callable[[], Any]  # runs one step; its result is ready when the step is done


class Stand:
    """Everything of one process that stays on its device: one state for all variants, one batch."""

    def __init__(self, config: Config):
        self.mesh = make_mesh(config.mesh)
        trainer = make_trainer(config, self.mesh)
        self.state = trainer.init()
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        shape = (config.train.batch_size, config.data.seq_len + 1)
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
        self.batch = jax.make_array_from_callback(shape, sharding, lambda index: tokens[index])

    def compiled(self, config: Config) -> Compiled:
        """The training step of a config."""
        trainer = make_trainer(config, self.mesh)
        return trainer.step.lower(trainer.state_shapes, self.batch).compile()

    def step_of(self, program: Compiled) -> Step:
        """A step that goes on from the state that the step before left."""

        def run() -> Any:
            self.state, metrics = program(self.state, self.batch)
            return metrics

        return run

    def communication(self, config: Config) -> Compiled:
        """The collectives of a config's step."""
        trainer = make_trainer(config, self.mesh)
        traced = trainer.step.trace(trainer.state_shapes, self.batch)
        return communication(collectives_of(traced.jaxpr), self.mesh).lower().compile()


def seconds_per_step(step: Step, steps: int) -> float:
    """Mean of `steps` in a row, started together with the other processes."""
    multihost_utils.sync_global_devices("round")
    start = time.perf_counter()
    for _ in range(steps):
        result = step()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps


def choose_rate(compute: Step, transfer: Step, steps: int) -> float:
    """Bits per second at which communication alone takes about as long as compute alone; the same on all ranks."""
    rate = _PROBE_RATE
    seconds_per_step(compute, 1)
    compute_s = seconds_per_step(compute, steps)
    for _ in range(2):  # start-up times do not scale with the rate
        box.set_rate(rate)
        seconds_per_step(transfer, 1)
        chosen = rate * seconds_per_step(transfer, steps) / compute_s
        rate = float(multihost_utils.broadcast_one_to_all(np.float32(chosen)))
    return round(rate, -6)


def measure(arguments: argparse.Namespace, configs: dict[str, Config]) -> None:
    """All rounds, in one process of the box."""
    box.join()
    box.set_rate(_PROBE_RATE)
    stand = Stand(configs["vanilla"])
    with without_communication():
        alone = {f"{COMPUTE}: {n}": stand.compiled(configs[n]) for n in _WITHOUT_COMMUNICATION if n in configs}
    steps: dict[str, Step] = {name: stand.step_of(program) for name, program in alone.items()}
    steps[COMMUNICATION] = stand.communication(configs["vanilla"])
    if arguments.rate == "auto":
        rate = choose_rate(steps[f"{COMPUTE}: vanilla"], steps[COMMUNICATION], arguments.steps)
    else:
        rate = box.parse_rate(arguments.rate)
    box.set_rate(rate)
    with tempfile.TemporaryDirectory() as folder:
        times = calibrated(stand, configs["vanilla"], Path(folder), rate)
        task_times = json.loads(times.read_text(encoding="utf-8"))
        programs = {name: stand.compiled(_timed(config, times, rate)) for name, config in configs.items()}
    steps = {name: stand.step_of(program) for name, program in programs.items()} | steps
    tell("compiled")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.rounds + 1):
        for name, step in steps.items():
            step_s = seconds_per_step(step, arguments.steps)
            if turn:  # the first warms up
                seconds[name].append(step_s)
        tell(f"round {turn} of {arguments.rounds}")
    timelines = {name: traced(steps[name], programs[name]) for name in programs}
    box.hand_back({"rate_mbit": rate / 1e6, "task_times": task_times, "seconds": seconds, "timelines": timelines})


def calibrated(stand: Stand, config: Config, folder: Path, rate: float) -> Path:
    """A file of how long tasks take here, read off traced steps of rank 0; the same on all ranks."""
    schedule = dataclasses.replace(config.schedule, policy="unified", microbatches=2, weight_grad="greedy")
    config = dataclasses.replace(config, schedule=schedule)
    program = stand.compiled(_timed(config, None, rate))
    step, kinds = stand.step_of(program), config.model.block_kinds
    found = [seconds_by_op(traced(step, program), kinds) for _ in range(_TRACES)]
    own = [[[each.get(op, {}).get(direction, 0.0) for direction in "FBW"] for op in OPS] for each in found]
    median = multihost_utils.broadcast_one_to_all(np.median(np.array(own, np.float32), axis=0))
    file = folder / "task_times.json"
    rows = zip(OPS, median.tolist(), strict=True)
    write_times(file, {op: dict(zip("FBW", row, strict=True)) for op, row in rows if any(row)})
    return file


def _timed(config: Config, times: Path | None, rate: float) -> Config:
    """Scheduled by these times and the links' rate."""
    schedule = dataclasses.replace(
        config.schedule, task_times=None if times is None else str(times), link_gb_per_s=rate / 8e9
    )
    return dataclasses.replace(config, schedule=schedule)


def tell(line: str) -> None:
    """Print once, not once for every process."""
    if box.rank() == 0:
        print(line, flush=True)


def traced(step: Step, program: Compiled) -> list[Operation]:
    """What ran when in one step."""
    with tempfile.TemporaryDirectory() as folder:
        for turn in ("warm-up", "measured"):  # a step slows down while the profiler starts
            multihost_utils.sync_global_devices(turn)
            with jax.profiler.trace(Path(folder) / turn):
                jax.block_until_ready(step())
        return read_trace(Path(folder) / "measured", program.as_text() or "")


def chosen(names: str | None) -> dict[str, list[str]]:
    """The variants to run, vanilla always among them. Raises ConfigError."""
    wanted = {"vanilla", *names.split(",")} if names else {name for name in VARIANTS if "flat" not in name}
    if unknown := sorted(wanted - set(VARIANTS)):
        raise ConfigError(f"--variants={unknown[0]} is unknown: choose of {', '.join(VARIANTS)}")
    return {name: settings for name, settings in VARIANTS.items() if name in wanted}


def main() -> None:
    """Run the box, print the table, and write JSON and pictures to results/."""
    parser = argparse.ArgumentParser(prog="python profiling/cluster_in_a_box.py", description=__doc__)
    parser.add_argument("--config", default="configs/bench/box.yaml")
    parser.add_argument(
        "--rate", default="auto", help="of every link, e.g. 400mbit; auto: as slow as compute (default)"
    )
    parser.add_argument("--steps", type=int, default=2, help="of a variant in a round (default 2)")
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    parser.add_argument(
        "--variants", metavar="NAME,…", help=f"beside vanilla, of {', '.join(VARIANTS)} (default all but flat)"
    )
    parser.add_argument("--name", default="cluster_in_a_box", help="of the files in results/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all variants")
    box.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    for name in ("steps", "rounds"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}={getattr(arguments, name)} must be at least 1")
    for setting in ("schedule.task_times", "schedule.link_gb_per_s"):
        if any(override.startswith(setting) for override in arguments.overrides):
            raise ConfigError(f"{setting} is measured here: leave it out")
    variants = chosen(arguments.variants)
    configs = {
        name: load_config(arguments.config, [*arguments.overrides, *settings]) for name, settings in variants.items()
    }
    if box.rank() is not None:
        measure(arguments, configs)
        return
    if arguments.rate != "auto":
        box.parse_rate(arguments.rate)
    settings = box.box_from(arguments)
    found = box.run_in_box(settings)
    found["timelines"] = {name: [Operation(*each) for each in step] for name, step in found["timelines"].items()}
    result = summary(found, variants)
    print(table(result))
    for path in (
        write_picture(result, RESULTS / f"{arguments.name}.png"),
        write_timelines(found["timelines"], RESULTS / f"{arguments.name}_timeline.png"),
    ):
        print(f"written: {path}")
    write_result(arguments.name, result | {"box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
