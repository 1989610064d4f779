"""Pipelined steps in wall-clock time, on two stages of two expert ranks in one box.

    sudo .venv/bin/python profiling/pipeline_box.py [section.key=value …]

Runs four processes in network namespaces, joined by throttled links; exchanges run in the background. The ranks of a
stage share a core, so that an idle stage leaves its core idle. Steps of the variants alternate; times are ratios to
plain 1F1B, whose blocks run unsplit. Writes results/pipeline_box.json and a picture of one traced step of each variant.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import box
import numpy as np
from benchmark_harness import Harness, print_once, seconds_per_step, traced
from box_picture import write_timelines
from count_argument import check_least
from pipeline_idle import EXPERT_RANKS, STAGES, bubble_of, operations_by_rank, ranks_by_stage, seconds_of_send
from results_file import RESULTS, quartiles, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.trace import TracedOperation
from moe_jax.step.pipelined.build import make_plan

_UNIFIED = ["schedule.policy=unified", "schedule.microbatches=2"]
BASE = "1f1b"
VARIANTS = {
    BASE: ["schedule.pipeline=1f1b"],
    "1f1b+unified": ["schedule.pipeline=1f1b", *_UNIFIED],
    "gpipe": ["schedule.pipeline=gpipe"],
    "coscheduled": ["schedule.pipeline=coscheduled"],
    "coscheduled+unified": ["schedule.pipeline=coscheduled", *_UNIFIED],
}
_COMMON = [
    f"mesh.pipeline={STAGES}",
    f"mesh.expert={EXPERT_RANKS}",
    "exchange.reduction=all_reduce",  # gradients are summed after the ticks
    "train.grad_accumulation=8",
    "train.batch_size=64",
]
_TFLOPS = 0.03
_TRACES = 3  # traced steps of each variant


def measure(arguments: argparse.Namespace, configs: dict[str, Config]) -> None:
    """Run all rounds, in one process of the box."""
    box.join()
    box.set_data_rate(box.parse_rate(arguments.rate))
    harness = Harness(configs[BASE])
    programs = {}
    for name, config in configs.items():
        programs[name] = harness.compiled(config)
        print_once(f"compiled {name}")
    steps = {name: harness.step_of(program) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(arguments.rounds + 1):
        for name, step in steps.items():
            step_s = seconds_per_step(step, arguments.steps)
            if round_index:  # round 0 is the warm-up
                seconds[name].append(step_s)
        print_once(f"round {round_index} of {arguments.rounds}")
    timelines, bubbles = {}, {}
    send_s = seconds_of_send(harness.mesh, configs[BASE])
    for name, config in configs.items():
        table, found = make_plan(config, harness.mesh).table, []
        for _ in range(_TRACES):
            operations = [each for each in traced(steps[name], programs[name]) if not each.name.startswith("while")]
            ranks = operations_by_rank(operations)
            found.append(bubble_of(ranks, table, send_s))
        bubbles[name] = {key: float(np.median([each[key] for each in found])) for key in found[0]}
        for number, (first, *_) in enumerate(ranks_by_stage(ranks)):
            timelines[f"{name}, stage {number}"] = first
    box.return_values({"seconds": seconds, "timelines": timelines, "bubbles": bubbles, "send_s": send_s})


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians and quartiles of seconds, and of ratios within a round; and idle shares."""
    seconds = found["seconds"]
    return {
        name: {
            "settings": VARIANTS[name],
            "step_s": quartiles(own),
            "speed_up_over_1f1b": quartiles([b / a for a, b in zip(own, seconds[BASE], strict=True)]),
            "bubble": {what: rounded(value) for what, value in found["bubbles"][name].items()},
        }
        for name, own in seconds.items()
    }


def text(rows: dict[str, Any]) -> str:
    """Format the summary as a table."""
    lines = [f"{'':20}  step s  × {BASE}  idle: measured, by formula, of its own slots, with sends"]
    for name, row in rows.items():
        lines.append(
            f"{name:20}  {row['step_s']['median']:6.3f}  {row['speed_up_over_1f1b']['median']:6.3f}"
            f"  {row['bubble']['measured']:14.1%}  {row['bubble']['formula']:10.1%}"
            f"  {row['bubble']['own_slots']:16.1%}  {row['bubble']['own_slots_and_sends']:10.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the box, print the table, and write JSON and a picture to results/."""
    parser = CommandParser(prog="python profiling/pipeline_box.py", description=__doc__)
    box.add_round_flags(parser, rate="150mbit", out_of="process", unit="variant in a round", rounds=5)
    parser.add_argument("--variants", metavar="NAME,…", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--name", default="pipeline_box", help="of the files in results/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all variants")
    box.add_arguments(parser)
    cores = sorted(os.sched_getaffinity(0))
    cores_of_ranks = [str(cores[stage % len(cores)]) for stage in range(STAGES) for _ in range(EXPERT_RANKS)]
    parser.set_defaults(processes=STAGES * EXPERT_RANKS, cores=",".join(cores_of_ranks))
    arguments = parser.parse_intermixed_args()
    check_least(arguments, steps=1, rounds=1)
    if arguments.processes != STAGES * EXPERT_RANKS:
        raise ConfigError(f"--processes={arguments.processes}: this needs {STAGES * EXPERT_RANKS}, leave it out")
    names = list(dict.fromkeys([BASE, *arguments.variants.split(",")]))
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigError(f"--variants={unknown[0]} is unknown: choose of {', '.join(VARIANTS)}")
    # rates used to order the tasks: the link's, and the speed of a core shared by two ranks
    rates = [f"schedule.link_gb_per_s={box.parse_rate(arguments.rate) / 8e9:g}", f"schedule.device_tflops={_TFLOPS}"]
    common = [*_COMMON, *rates, *arguments.overrides]
    configs = {name: load_config(arguments.config, [*common, *VARIANTS[name]]) for name in names}
    if box.rank() is not None:
        measure(arguments, configs)
        return
    settings = box.box_from(arguments)
    found = box.run_in_box(settings)
    rows = summary(found)
    print(text(rows))
    timelines: dict[str, Sequence[TracedOperation]] = {
        name: [TracedOperation(*each) for each in step] for name, step in found["timelines"].items()
    }
    print(f"written: {write_timelines(timelines, RESULTS / f'{arguments.name}.png')}")
    result = {"rate": arguments.rate, "send_s": rounded(found["send_s"]), "variants": rows}
    write_result(arguments.name, result | {"box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
