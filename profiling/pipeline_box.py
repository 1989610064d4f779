"""Pipelined steps in wall-clock time, on two stages of two expert ranks in one box.

    sudo .venv/bin/python profiling/pipeline_box.py [section.key=value …]

Four processes in network namespaces, joined by throttled links; exchanges run in the background. The ranks of a stage
share a core, so that an idle stage leaves its core idle. Steps of each variant run in turn; times are ratios to plain
1F1B, whose blocks run uncut. Writes results/pipeline_box.json and a picture of one traced step of each.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import box
import numpy as np
from box_picture import write_timelines
from jax.experimental import multihost_utils
from results_file import RESULTS, quartiles, rounded, write_result
from stand import Stand, seconds_per_step, tell, traced

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import ConfigError, run_command
from moe_jax.measure.trace import Operation, joined
from moe_jax.schedule.pipelines.bubble import lock_step_bubble
from moe_jax.schedule.pipelines.table import Table
from moe_jax.train.pipeline.plan import make_plan

STAGES, EXPERT_RANKS = 2, 2
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
    "exchange.reduction=all_reduce",  # gradients are summed behind the ticks
    "train.grad_accumulation=8",
    "train.batch_size=32",
    "model.d_model=256",
    "model.moe.hidden_dim=512",
]


def measure(arguments: argparse.Namespace, configs: dict[str, Config]) -> None:
    """All rounds, in one process of the box."""
    box.join()
    box.set_data_rate(box.parse_rate(arguments.rate))
    stand = Stand(configs[BASE])
    programs = {}
    for name, config in configs.items():
        programs[name] = stand.compiled(config)
        tell(f"compiled {name}")
    steps = {name: stand.step_of(program) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.rounds + 1):
        for name, step in steps.items():
            step_s = seconds_per_step(step, arguments.steps)
            if turn:  # the first warms up
                seconds[name].append(step_s)
        tell(f"round {turn} of {arguments.rounds}")
    timelines, bubbles = {}, {}
    for name, config in configs.items():
        operations = traced(steps[name], programs[name])
        timelines[name] = [each for each in operations if not each.name.startswith("while")]
        bubbles[name] = bubble_of(timelines[name], make_plan(config, stand.mesh).table)
    box.hand_back({"seconds": seconds, "timelines": timelines, "bubbles": bubbles})


def bubble_of(operations: Sequence[Operation], table: Table) -> dict[str, float]:
    """Which share of all ticks a stage has no pass under way, on average: as measured, and by the table.

    By it a tick is as long as its longest slot, and a pass as long as it is on its stage on average; two passes in one
    slot hide each other, so such tables say nothing. The first stage works from the first tick to the last.
    """
    passes = {name: _under_way(operations, name) for name in ("F", "B", "FB")}
    own = [sum(end - start for start, end in passes[name]) for name in passes]
    span = passes["FB"][-1][1] - passes["FB"][0][0]
    shared = np.asarray(multihost_utils.process_allgather(np.array([*own, span], np.float32))).reshape(-1, 4)
    of_stage = shared.reshape(table.stages, -1, 4).mean(axis=1)
    works = table.microbatches * table.chunks
    slots = [
        [sum(of_stage[stage]["FB".index(d)] / works for d, _ in slot.tasks()) for stage, slot in enumerate(ticks)]
        for ticks in table.ticks
    ]
    both = any(slot.forward and slot.backward for ticks in table.ticks for slot in ticks)
    return {
        "measured": float(np.mean(1 - of_stage[:, 2] / of_stage[0, 3])),
        "by_table": float("nan") if both else float(1 - np.sum(slots) / (table.stages * sum(map(max, slots)))),
        "by_equal_passes": lock_step_bubble(table, 1.0, 1.0),
        "forward_s": float(of_stage[:, 0].mean() / works),
        "backward_s": float(of_stage[:, 1].mean() / works),
    }


def _under_way(operations: Sequence[Operation], directions: str) -> list[tuple[float, float]]:
    return joined([(each.start_s, each.end_s) for each in operations if each.task[:1] in set(directions)])


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles of seconds, and of ratios within a round; idle shares."""
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
    """The summary as a table."""
    lines = [f"{'':20}  step s  × {BASE}  idle: measured, by the table"]
    for name, row in rows.items():
        lines.append(
            f"{name:20}  {row['step_s']['median']:6.3f}  {row['speed_up_over_1f1b']['median']:6.3f}"
            f"  {row['bubble']['measured']:14.1%}  {row['bubble']['by_table']:12.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the box, print the table, and write JSON and a picture to results/."""
    parser = argparse.ArgumentParser(prog="python profiling/pipeline_box.py", description=__doc__)
    parser.add_argument("--config", default="configs/bench/box.yaml")
    parser.add_argument("--rate", default="100mbit", help="out of each process (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="of a variant in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--variants", metavar="NAME,…", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--name", default="pipeline_box", help="of the files in results/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all variants")
    box.add_arguments(parser)
    cores = sorted(os.sched_getaffinity(0))
    of_stages = [str(cores[stage % len(cores)]) for stage in range(STAGES) for _ in range(EXPERT_RANKS)]
    parser.set_defaults(processes=STAGES * EXPERT_RANKS, cores=",".join(of_stages))
    arguments = parser.parse_intermixed_args()
    for name in ("steps", "rounds"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}={getattr(arguments, name)} must be at least 1")
    if arguments.processes != STAGES * EXPERT_RANKS:
        raise ConfigError(f"--processes={arguments.processes}: this needs {STAGES * EXPERT_RANKS}, leave it out")
    names = list(dict.fromkeys([BASE, *arguments.variants.split(",")]))
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigError(f"--variants={unknown[0]} is unknown: choose of {', '.join(VARIANTS)}")
    box.parse_rate(arguments.rate)
    configs = {name: load_config(arguments.config, [*_COMMON, *arguments.overrides, *VARIANTS[name]]) for name in names}
    if box.rank() is not None:
        measure(arguments, configs)
        return
    settings = box.box_from(arguments)
    found = box.run_in_box(settings)
    rows = summary(found)
    print(text(rows))
    timelines: dict[str, Sequence[Operation]] = {
        name: [Operation(*each) for each in step] for name, step in found["timelines"].items()
    }
    print(f"written: {write_timelines(timelines, RESULTS / f'{arguments.name}.png')}")
    write_result(arguments.name, {"rate": arguments.rate, "variants": rows, "box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
