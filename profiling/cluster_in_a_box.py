"""Training steps on a throttled cluster in one box.

    sudo .venv/bin/python profiling/cluster_in_a_box.py [section.key=value …]

Processes in network namespaces run the project's own step on XLA:CPU, each on one core, with collectives that run in
the background (`exchange.algorithm=background`). First, the times of tasks are measured; schedules are built from them.
All variants are compiled at the start and then alternate, a few steps of each in every round, so that ratios compare
measurements that are close in time.

The same rounds measure compute alone (the steps with local stand-ins for their collectives) and communication alone
(the collectives of the plain step, one after another). No schedule can be faster than the longer of the two. Gradients
are summed in the background, too. Variants with `flat` use XLA's own collectives; they run only if named in
`--variants`, and need `--threads 2` to overlap anything. Variants with `sharded` shard parameters, gradients and
moments (`optimizer.zero=3`), and run only if named, too:

    sudo .venv/bin/python profiling/cluster_in_a_box.py --processes 4 --name fully_sharded_box \
        --variants unified+weight_grad+grad_reduce,vanilla+sharded,unified+weight_grad+grad_reduce+sharded mesh.data=2
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import box
import numpy as np
from benchmark_harness import Harness, Step, print_once, profiled, seconds_per_step, traced
from box_picture import write_picture, write_timelines
from box_summary import COMMUNICATION, COMPUTE, summary, table
from count_argument import check_least
from jax.experimental import multihost_utils
from no_comm_variants import without_communication
from results_file import RESULTS, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.trace import TracedOperation
from moe_jax.plan.measured import write_times

_PIPELINE = ["schedule.policy=expert_pipeline", "schedule.microbatches=2"]
_UNIFIED = ["schedule.policy=unified", "schedule.microbatches=2"]
_GREEDY = ["schedule.weight_grad=greedy"]
_CHUNKED = ["schedule.grad_reduce=bucketed", "schedule.bucket_cap_mb=2"]
_SHARDED = ["optimizer.zero=3"]  # parameters, too
_FLAT = ["exchange.algorithm=flat", "exchange.reduction=all_reduce"]  # XLA's own collectives
# name: settings. The first two are the baselines of the others.
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
    "vanilla+sharded": _SHARDED,  # everything is gathered before the first block
    "unified+weight_grad+grad_reduce+sharded": _UNIFIED + _GREEDY + _CHUNKED + _SHARDED,
    "vanilla+flat": _FLAT,
    "expert_pipeline+flat": _PIPELINE + _FLAT,
    "unified+flat": _UNIFIED + _FLAT,
}
_ONLY_IF_NAMED = ("flat", "sharded")
_WITHOUT_COMMUNICATION = ("vanilla", "unified")  # the second shows the cost of splitting the batch
_PROBE_RATE = 400e6  # bit/s at which `--rate auto` measures communication first


def choose_rate(compute: Step, transfer: Step, steps: int) -> float:
    """Return bits per second at which communication alone takes about as long as compute alone; equal on all ranks."""
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
    """Run all rounds, in one process of the box."""
    box.join()
    box.set_rate(_PROBE_RATE)
    harness = Harness(configs["vanilla"])
    with without_communication():
        alone = {f"{COMPUTE}: {n}": harness.compiled(configs[n]) for n in _WITHOUT_COMMUNICATION if n in configs}
    steps: dict[str, Step] = {name: harness.step_of(program) for name, program in alone.items()}
    steps[COMMUNICATION] = harness.communication(configs["vanilla"])
    if arguments.rate == "auto":
        rate = choose_rate(steps[f"{COMPUTE}: vanilla"], steps[COMMUNICATION], arguments.steps)
    else:
        rate = box.parse_rate(arguments.rate)
    box.set_rate(rate)
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "task_times.json"
        profile = profiled(harness, configs["vanilla"], parts=[2])
        write_times(times, profile.tasks, profile.rest_s)
        task_times = json.loads(times.read_text(encoding="utf-8"))
        # a state for whole parameters, and one for shards
        harnesses = {config.optimizer.zero: Harness(config) for config in configs.values()} | {0: harness}
        owner = {name: harnesses[config.optimizer.zero] for name, config in configs.items()}
        programs = {name: owner[name].compiled(_timed(config, times, rate)) for name, config in configs.items()}
    steps = {name: owner[name].step_of(program) for name, program in programs.items()} | steps
    print_once("compiled")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(arguments.rounds + 1):
        for name, step in steps.items():
            step_s = seconds_per_step(step, arguments.steps)
            if round_index:  # round 0 is the warm-up
                seconds[name].append(step_s)
        print_once(f"round {round_index} of {arguments.rounds}")
    timelines = {name: traced(steps[name], programs[name]) for name in programs}
    box.return_values({"rate_mbit": rate / 1e6, "task_times": task_times, "seconds": seconds, "timelines": timelines})


def _timed(config: Config, times: Path, rate: float) -> Config:
    """Return the config scheduled by these task times and the rate of the links."""
    schedule = dataclasses.replace(config.schedule, task_times=str(times), link_gb_per_s=rate / 8e9)
    return dataclasses.replace(config, schedule=schedule)


def chosen(names: str | None) -> dict[str, list[str]]:
    """Return the variants to run, which always include vanilla. Raises ConfigError."""
    wanted = (
        {"vanilla", *names.split(",")} if names else {name for name in VARIANTS if not name.endswith(_ONLY_IF_NAMED)}
    )
    if unknown := sorted(wanted - set(VARIANTS)):
        raise ConfigError(f"--variants={unknown[0]} is unknown: choose of {', '.join(VARIANTS)}")
    return {name: settings for name, settings in VARIANTS.items() if name in wanted}


def main() -> None:
    """Run the box, print the table, and write JSON and pictures to results/."""
    parser = CommandParser(prog="python profiling/cluster_in_a_box.py", description=__doc__)
    parser.add_argument("--config", default="configs/bench/box.yaml")
    parser.add_argument(
        "--rate", default="auto", help="of every link, e.g. 400mbit; auto: as slow as compute (default)"
    )
    parser.add_argument("--steps", type=int, default=2, help="of a variant in a round (default 2)")
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    parser.add_argument(
        "--variants",
        metavar="NAME,…",
        help=f"in addition to vanilla, of {', '.join(VARIANTS)} (default: all but flat and sharded)",
    )
    parser.add_argument("--name", default="cluster_in_a_box", help="of the files in results/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all variants")
    box.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    check_least(arguments, steps=1, rounds=1)
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
    found["timelines"] = {name: [TracedOperation(*each) for each in step] for name, step in found["timelines"].items()}
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
