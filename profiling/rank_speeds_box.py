"""Do uneven shares of experts speed up steps as planned where one of two processes is slower?

    sudo .venv/bin/python profiling/rank_speeds_box.py

Each process in the box may use its share of a core only, once it has compiled. Steps of a dropless model with a
balanced router alternate: with equally many experts on both ranks, and with the number that `migration.rank_speeds`
gives each from its share. The plan predicts both from the rates of matrix products in the two processes, measured in
the same rounds. Takes about 10 minutes, on an otherwise idle machine. Writes results/rank_speeds_box.json.
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import box
import jax
import numpy as np
from benchmark_harness import Harness, Step, print_once, seconds_per_step
from jax.experimental import multihost_utils
from results_file import quartiles, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.expert_shares import expert_counts
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.estimate import estimate

RANKS = 2
_COMMON = [
    *("mesh.data=1", f"mesh.expert={RANKS}", "model.num_layers=2", "model.moe.num_experts=16"),
    *("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "model.moe.gate=balanced"),
    "exchange.reduction=all_reduce",
]
_LEAST_SHARE = 0.1
_WIDTH, _SECONDS = 512, 1.5  # of the matrix products that measure a process's rate


def configs_of(path: str, shares: tuple[float, ...]) -> dict[str, Config]:
    """Return the config with equal shares of experts and with uneven ones, by the speeds of the ranks."""
    equal = load_config(path, _COMMON)
    experts = equal.model.moe.num_experts
    most = max(expert_counts(experts, shares, experts))
    speeds = ",".join(map(str, shares))
    uneven = ["migration.enabled=true", f"migration.rank_speeds=[{speeds}]"]
    return {
        "equal": equal,
        "uneven": load_config(path, [*_COMMON, *uneven, f"migration.replicas={most - experts // RANKS}"]),
    }


def matrix_flops() -> float:
    """Return this process's floating-point operations per second in square products, while the others measure, too."""
    x = jax.device_put(np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH), np.float32), jax.local_devices()[0])
    product = jax.jit(lambda x: x @ x / _WIDTH)
    product(x).block_until_ready()
    multihost_utils.sync_global_devices("rates")
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS:
        product(x).block_until_ready()
        count += 1
    return 2 * _WIDTH**3 * count / (time.perf_counter() - start)


def measure(arguments: argparse.Namespace, configs: dict[str, Config], shares: tuple[float, ...]) -> None:
    """Run all rounds, in one process of the box."""
    box.join()
    steps: dict[str, Step] = {}
    for name, config in configs.items():
        harness = Harness(config)
        steps[name] = harness.step_of(harness.compiled(config))
    box.set_data_rate(box.parse_rate(arguments.rate))
    box.set_share(shares[jax.process_index()])
    found: dict[str, list[Any]] = {name: [] for name in (*steps, "flops")}
    for round_index in range(arguments.rounds + 1):
        flops = multihost_utils.process_allgather(np.float32(matrix_flops())).tolist()
        took = {name: seconds_per_step(step, arguments.steps) for name, step in steps.items()}
        if round_index:  # round 0 is the warm-up
            for name, value in (took | {"flops": flops}).items():
                found[name].append(value)
        print_once(
            f"round {round_index} of {arguments.rounds}: {took['equal']:.2f} s equal, {took['uneven']:.2f} s uneven"
        )
    box.return_values(found)


def cluster_of(flops: tuple[float, ...], bits_per_s: float) -> Cluster:
    """Return two CPU devices, the first as fast as measured, the second slower, joined by the links of the box."""
    cluster, fastest = find_cluster(f"cpux{RANKS}"), max(flops)
    measured = fastest / cluster.device.matrix_flops_per_s
    device = cluster.device.at_speed(measured)
    (level,) = cluster.levels
    return dataclasses.replace(
        cluster,
        device=device,
        levels=(dataclasses.replace(level, bytes_per_s=bits_per_s / 8),),
        speeds=tuple((1, each / fastest) for each in flops),
    )


def summary(found: dict[str, Any], configs: dict[str, Config], bits_per_s: float) -> dict[str, Any]:
    """Summarise measured and predicted times."""
    cluster = cluster_of(tuple(statistics.median(each) for each in zip(*found["flops"], strict=True)), bits_per_s)
    planned_s = {name: estimate(config, cluster).step_s for name, config in configs.items()}
    speeds = configs["uneven"].rank_speeds
    assert speeds is not None
    experts, replicas = configs["uneven"].model.moe.num_experts, configs["uneven"].replicas
    ratios = [uneven_s / equal_s for equal_s, uneven_s in zip(found["equal"], found["uneven"], strict=True)]
    return {
        "experts_of_ranks": list(expert_counts(experts, speeds, experts // RANKS + replicas)),
        "matrix_gflops": [quartiles([flops / 1e9 for flops in each]) for each in zip(*found["flops"], strict=True)],
        "step_s": {name: quartiles(found[name]) for name in configs},
        "step_s_planned": {name: rounded(seconds) for name, seconds in planned_s.items()},
        "uneven_over_equal": quartiles(ratios),
        "uneven_over_equal_planned": rounded(planned_s["uneven"] / planned_s["equal"]),
    }


def main() -> None:
    """Run the box and write JSON to results/."""
    parser = CommandParser(prog="python profiling/rank_speeds_box.py", description=__doc__)
    parser.add_argument("--shares", default="0.5,0.25", help="of a core for each process (default: %(default)s)")
    parser.add_argument("--name", default="rank_speeds_box", help="of the file in results/ (default: %(default)s)")
    arguments = box.parse_round_flags(parser, unit="half round", processes=[RANKS])
    try:
        shares = tuple(float(share) for share in arguments.shares.split(","))
    except ValueError:
        shares = ()
    if len(shares) != RANKS or not all(_LEAST_SHARE <= share <= 1 for share in shares):
        raise ConfigError(f"--shares={arguments.shares} must be {RANKS} numbers from {_LEAST_SHARE} to 1, e.g. 0.8,0.4")
    rate, configs = box.parse_rate(arguments.rate), configs_of(arguments.config, shares)
    if box.rank() is not None:
        measure(arguments, configs, shares)
        return
    settings = box.box_from(arguments, limits_cpu=True)
    result = summary(box.run_in_box(settings), configs, rate)
    about = {"shares": shares, "rate": arguments.rate, "box": dataclasses.asdict(settings)}
    write_result(arguments.name, result | about)


if __name__ == "__main__":
    run_command(main)
