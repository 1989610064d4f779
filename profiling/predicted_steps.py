"""Predicted against measured step times, on a throttled cluster in one box.

    sudo .venv/bin/python profiling/predicted_steps.py

Two processes in network namespaces are the cluster. The planner's inputs are measured separately from the steps that it
predicts: tasks of each model on each mesh, timed without communication (`benchmark_harness.profiled`); and the duration
of exchanges, alone and next to compute, and what each takes from compute (`link.Link`). Then training steps of
every model, mesh, policy, degree, chunk size and rate of the link alternate. Each runs after a step of compute alone;
the median pace of these, at each rate, scales the profile. Each step is compared with `plan.estimate`. A case is a
model and a rate: the step that is predicted to be fastest is compared with the fastest step measured. Experts have a
slot for every token, as in configs/bench/box.yaml, so a microbatch moves no more than its share. Writes
results/predicted_steps.json and .png.

    sudo .venv/bin/python profiling/predicted_steps.py --processes 4

Four processes are two nodes of two tensor ranks: rows are gathered and summed between neighbours, over links of
--node-rate, while others are exchanged between nodes (FSMoE's three streams). Attention's own collectives over tensor
ranks are part of the profiled tasks. Writes results/predicted_streams.json and .png.

    .venv/bin/python profiling/predicted_steps.py --processes 4 --predict

predicts the steps of the last result again, from what was measured for it, for instance after the planner changed.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import box
from benchmark_harness import IN_A_ROW, Harness, Profile, Step, print_once, profiled, seconds_per_step
from count_argument import check_least
from link import Link, slowest
from predicted_cases import MESHES, MODELS, VARIANTS, LinkTimes, TaskTimes, config_of, predicted_step_s, variants_on
from predicted_summary import summary, table, write_picture
from results_file import RESULTS, write_result

from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.parallel.mesh import Axis

_PARTS = (1, 4)
_SHARE = 0.45  # of a core for each of 4 processes: two share a core, and one must not be faster while the other waits
_RESULTS = {2: "predicted_steps", 4: "predicted_streams"}  # by number of processes


def measure(arguments: argparse.Namespace) -> None:
    """Measure everything, in one process of the box."""
    box.join()
    rates = [box.parse_rate(rate, "--rates") for rate in arguments.rates.split(",")]
    rows: list[dict[str, Any]] = []
    box.set_data_rate(rates[0])
    if arguments.processes == 4:
        box.set_share(_SHARE)
        box.set_neighbour_rate(box.parse_rate(arguments.node_rate), [(box.rank() or 0) ^ 1])
    with tempfile.TemporaryDirectory() as folder:
        for model, mesh in itertools.product(arguments.models, MESHES[arguments.processes]):
            cases = list(compare_on_mesh(model, mesh, rates, arguments, Path(folder)))
            print_once(table(summary(cases)))
            rows += cases
    box.return_values(rows)


def compare_on_mesh(
    model: str, mesh: str, rates: list[float], arguments: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield the predicted and measured times of a model on a mesh."""
    path = folder / "times.json"
    harness = Harness(config_of(model, mesh, *arguments.overrides))
    keep = Axis.TENSOR if harness.config.mesh.sizes["tensor"] > 1 else None
    profile = profiled(harness, harness.config, _PARTS, keep)
    times = TaskTimes(profile.tasks, profile.rest_s)
    times.write(path)
    print_once(f"{model}, {mesh} axis: profiled")
    link = Link(harness, profile, _SHARE if arguments.processes == 4 else 1.0)
    links = {rate: link.times(rate) for rate in rates}
    settings = [*arguments.overrides, f"schedule.task_times={path}"]
    configs = {variant: config_of(model, mesh, *settings, *VARIANTS[variant]) for variant in variants_on(mesh)}
    steps = {variant: harness.step_of(harness.compiled(config)) for variant, config in configs.items()}
    print_once(f"{model}, {mesh} axis: compiled")
    seconds = rounds(steps, profile, rates, arguments.rounds)
    for (rate, link_times), (variant, config) in itertools.product(links.items(), configs.items()):
        # The pace of the machine changes from minute to minute: predictions use the pace measured between these steps.
        alone = (alone_s for other in configs for alone_s, _ in seconds[rate, other])
        pace = statistics.median(alone) / profile.step_s
        yield {
            **{"model": model, "mesh": mesh, "way": variant, "rate_mbit": rate / 1e6, "pace": pace},
            "predicted_s": predicted_step_s(config, times, pace, link_times, path),
            "measured_s": [step_s for _, step_s in seconds[rate, variant]],
            **{"times": dataclasses.asdict(times), "link": dataclasses.asdict(link_times)},
        }


def rounds(
    steps: dict[str, Step], profile: Profile, rates: list[float], count: int
) -> dict[tuple[float, str], list[tuple[float, float]]]:
    """Return seconds of compute alone and of the step after it, for every step at every rate, round by round."""
    seconds: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for round_index, rate in itertools.product(range(count + 1), rates):
        box.set_data_rate(rate)
        for variant, step in steps.items():
            alone_s, step_s = slowest(seconds_per_step(profile.step, 1)), seconds_per_step(step, IN_A_ROW)
            if round_index:  # round 0 is the warm-up
                seconds.setdefault((rate, variant), []).append((alone_s, step_s))
    return seconds


def last_result(path: Path) -> dict[str, Any]:
    """Return the last result. Raises ConfigError if there is none, or one without its measurements."""
    result = json.loads(path.read_text()) if path.exists() else {}
    of_lines = [line.get("between") for known in result.get("known", {}).values() for line in known["links"].values()]
    if not of_lines or None in of_lines:
        raise ConfigError(f"--predict: {path.name} has no measurements to predict from: run without --predict first")
    return result


def predicted_again(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a result, each predicted from its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        for row in result["rows"]:
            known = result["known"][f"{row['model']}, {row['mesh']}"]
            times, link = TaskTimes.of(known), LinkTimes.of(known["links"][f"{row['rate_mbit']:.0f}"])
            times.write(path)
            settings = [f"schedule.task_times={path}", *VARIANTS[row["way"]]]
            config = config_of(row["model"], row["mesh"], *settings)
            yield {
                **{name: row[name] for name in ("model", "mesh", "way", "rate_mbit", "pace")},
                "predicted_s": predicted_step_s(config, times, row["pace"], link, path),
                "measured_s": [row["measured_s"]],
                **{"times": dataclasses.asdict(times), "link": dataclasses.asdict(link)},
            }


def main() -> None:
    """Run the box, print the table, and write JSON and a picture to results/."""
    parser = CommandParser(prog="python profiling/predicted_steps.py", description=__doc__)
    parser.add_argument("--rates", default="100mbit,200mbit,400mbit,800mbit", help="of the link between nodes")
    parser.add_argument(
        "--node-rate", default="1600mbit", help="between neighbours, of 4 processes (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--predict", action="store_true", help="predict the steps of the last result again")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all models")
    box.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    check_least(arguments, rounds=1)
    if box.rank() is not None:
        measure(arguments)
        return
    for rate in arguments.rates.split(","):
        box.parse_rate(rate, "--rates")
    box.parse_rate(arguments.node_rate, "--node-rate")
    if arguments.processes not in MESHES:
        raise ConfigError(f"--processes={arguments.processes}: this benchmark has 2 processes, or 4 in two nodes")
    name = _RESULTS[arguments.processes]
    if arguments.predict:
        last = last_result(RESULTS / f"{name}.json")
        found, settings = list(predicted_again(last)), last["box"]
    else:
        in_box = box.box_from(arguments, limits_cpu=arguments.processes == 4)
        found, settings = box.run_in_box(in_box), dataclasses.asdict(in_box)
    result = summary(found)
    print(table(result))
    print(f"written: {write_picture(result, RESULTS / f'{name}.png')}")
    write_result(name, result | {"box": settings})


if __name__ == "__main__":
    run_command(main)
