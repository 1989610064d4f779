"""The size of gradient buckets, tuned in a cluster in one box: the tuner's search of FlowMoE, section 4.3.

    sudo .venv/bin/python profiling/tuned_box.py [section.key=value …]

Two processes are joined by a throttled link with a start-up time for each message: at 400 Mbit/s, 8 ms cost as much as
8 µs cost at 50 GB/s.

1. Every size is timed, in rounds that include all sizes.
2. The tuner's search, a grid and random choice look for the best size with eight samples each, on those times.
3. A run trains and tunes itself, while the rate of its links changes.

Takes about half an hour. Prints the results and writes them to results/tuned_box.json with a picture.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import box
import numpy as np
from benchmark_harness import Harness, print_once, seconds_per_step
from count_argument import check_least
from results_file import RESULTS, quartiles, rounded, write_result
from tuned_picture import write_picture
from tuned_replay import SAMPLES, WITHIN, regrets

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.loop import train
from moe_jax.run.tuning_space import choices_of
from moe_jax.telemetry.run_log import FILE_NAME, read_metrics

# Sums of gradients take as long as exchanges, so that the size of buckets between them matters.
_SETTINGS = [
    "schedule.policy=unified",
    "schedule.microbatches=2",
    "schedule.weight_grad=greedy",
    "schedule.grad_reduce=bucketed",
    "model.num_layers=2",
    "train.batch_size=4",
    "tune.over=[bucket_cap_mb]",
    "tune.patience=20",
]
_LIVE = ["log.every=1", "log.tensorboard=false", "checkpoint.every=0", "train.eval_every=0", "train.steps=100000"]
_CALM_STEPS = 25  # steps of the run with its choice, before the rate changes and before the end
_STATE = "changed_at"
_RUN = "TUNED_BOX_RUN"  # the folder of the run, for the processes of the box


def sweep(configs: dict[float, Config], rate: float, rounds: int, iterations: int) -> list[list[float]]:
    """Return seconds of a step of each size in each round, the median of `iterations` as in the tuner."""
    box.set_data_rate(rate)
    harness = Harness(next(iter(configs.values())))
    steps = []
    for number, config in enumerate(configs.values()):
        steps.append(harness.step_of(harness.compiled(config)))
        print_once(f"compiled {number + 1} of {len(configs)}")
    seconds: list[list[float]] = [[] for _ in steps]
    for round_index in range(rounds):
        # forwards and backwards, so that slow changes of the machine affect all sizes alike
        for number in list(range(len(steps)))[:: 1 if round_index % 2 else -1]:
            seconds_per_step(steps[number], 1)
            seconds[number].append(statistics.median(seconds_per_step(steps[number], 1) for _ in range(iterations)))
        print_once(f"round {round_index + 1} of {rounds}")
    return seconds


def live(config: Config, rates: tuple[float, float], deadline: float) -> None:
    """Train until the run has tuned itself at both rates."""
    box.set_data_rate(rates[0])
    with (
        _changed_rate(Path(config.log.dir), rates[1], deadline),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        train(config)


@contextlib.contextmanager
def _changed_rate(run: Path, rate: float, deadline: float) -> Iterator[None]:
    """While the run trains, change the rate once it has chosen, and end the run once it has chosen again."""
    over = threading.Event()

    def reached(searches: int) -> bool:
        """Return whether the run has finished this number of searches and some more steps."""
        while not over.wait(0.1) and time.monotonic() < deadline:
            records = read_metrics(run) if (run / FILE_NAME).exists() else []
            ends = [record["step"] for record in records if "chosen_step_s" in record]
            if len(ends) >= searches and records[-1]["step"] >= ends[searches - 1] + _CALM_STEPS:
                return True
        return False

    def watch() -> None:
        if reached(1):
            box.set_data_rate(rate)
            if box.rank() == 0:
                (run / _STATE).write_text(str(read_metrics(run)[-1]["step"]))
            reached(2)
        if box.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # jax informs the other processes

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def live_summary(run: Path, rates: tuple[float, float]) -> dict[str, Any]:
    """Summarise the records of the run."""
    records = read_metrics(run)
    changed = run / _STATE

    def having(prefix: str) -> list[list[Any]]:
        key = f"{prefix}_step_s"
        return [[r["step"], r[f"{prefix}_bucket_cap_mb"], rounded(r[key])] for r in records if key in r]

    tried, chosen = having("tried"), having("chosen")
    ends = [each[0] for each in chosen] + [records[-1]["step"]]
    starts = [min((each[0] for each in tried if each[0] > end), default=None) for end in [0, *ends]]
    return {
        "rates_mbit": [rate / 1e6 for rate in rates],
        "changed_at": int(changed.read_text()) if changed.exists() else None,
        "searches": [pair for pair in zip(starts, ends, strict=False) if pair[0] is not None],
        "tried": tried,
        "chosen": chosen,
        "step_s": [[r["step"], rounded(r["step_s"])] for r in records if "step_s" in r],
    }


def measure(arguments: argparse.Namespace, config: Config, rates: tuple[float, float]) -> None:
    """Run all three parts, in one process of the box."""
    box.join()
    box.set_latency(arguments.latency_ms / 1e3)
    choices = choices_of(config, make_mesh(config.mesh))
    assert choices is not None
    sizes = [choices.settings(number)["bucket_cap_mb"] for number in range(len(choices.values))]
    configs = {float(size): choices.config_of(number) for number, size in enumerate(sizes)}
    seconds = sweep(configs, rates[0], arguments.rounds, config.tune.iterations)
    print_once("training")
    deadline = time.monotonic() + 60 * arguments.minutes
    live(config, rates, deadline)
    box.return_values({"sizes": list(configs), "seconds": seconds, "live": live_summary(Path(config.log.dir), rates)})


def summary(found: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Return the results of the three parts as plain values."""
    seconds = np.array(found["seconds"])
    rows = [quartiles(each) for each in found["seconds"]]
    medians = [row["median"] for row in rows]
    best = int(np.argmin(medians))
    return {
        "sweep": {
            "bucket_cap_mb": found["sizes"],
            "step_s": rows,
            "best_chunk_mb": found["sizes"][best],
            "worst_over_best": rounded(max(medians) / medians[best]),
        },
        "replay": regrets(found["sizes"], seconds, seeds),
        "live": found["live"],
    }


def text(result: dict[str, Any]) -> str:
    """Format the summary as text."""
    lines = [
        f"best of {len(result['sweep']['bucket_cap_mb'])} sizes {result['sweep']['best_chunk_mb']} MB, "
        f"the worst takes {result['sweep']['worst_over_best']} × its time"
    ]
    for name, row in result["replay"].items():
        lines.append(
            f"{name:<7} after {SAMPLES} samples {row['mean'][-1]:.2%} slower than the best, "
            f"within {WITHIN:.0%} of it in {row['within_2_percent'][-1]:.1%} of the cases"
        )
    run = result["live"]
    lines += [f"step {step}: chose {mb} MB, {seconds} s per step" for step, mb, seconds in run["chosen"]]
    return "\n".join([*lines, f"rate changed at step {run['changed_at']}"])


def main() -> None:
    """Run the box, print the results, and write JSON and a picture to results/."""
    parser = CommandParser(prog="python profiling/tuned_box.py", description=__doc__)
    parser.add_argument("--config", default="configs/bench/box.yaml")
    parser.add_argument("--rates", default="400mbit,150mbit", help="of every link, before and after the change")
    parser.add_argument("--latency-ms", type=float, default=8.0, help="of a message (default 8)")
    parser.add_argument("--rounds", type=int, default=4, help="through all sizes (default 4)")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of the training run (default 8)")
    parser.add_argument("--seeds", type=int, default=500, help="of each search method (default 500)")
    parser.add_argument("--name", default="tuned_box", help="of the files in results/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of the model and the run")
    box.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    check_least(arguments, rounds=1, seeds=1)
    before, comma, after = arguments.rates.partition(",")
    if not comma:
        raise ConfigError(f"--rates={arguments.rates} must be two, e.g. 400mbit,150mbit")
    rates = box.parse_rate(before, "--rates"), box.parse_rate(after, "--rates")
    settings = box.box_from(arguments)
    if box.rank() is not None:
        run = Path(os.environ[_RUN])
        measure(
            arguments,
            load_config(arguments.config, [*_SETTINGS, *_LIVE, f"log.dir={run}", *arguments.overrides]),
            rates,
        )
        return
    load_config(arguments.config, [*_SETTINGS, *_LIVE, *arguments.overrides])
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_RUN] = folder
        found = box.run_in_box(settings)
    result = summary(found, arguments.seeds)
    print(text(result))
    print(f"written: {write_picture(result, RESULTS / f'{arguments.name}.png')}")
    write_result(arguments.name, result | {"box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
