"""What pipelining saves, by simulation, over a grid of MoE layers: python profiling/predicted_speedups.py

Simulates the customised layers of FlowMoE's experiments: every device has B sequences of N tokens, the hidden size is
M, experts have width H, the number of slots is f times the even share, and there is one expert for each device and two
experts for each token. Each layer that fits into the memory of 16 RTX 3090 or 32 RTX 2080 Ti is simulated with
`vanilla`, and with `expert_pipeline` and `unified` at their best degrees. Takes a minute. Writes
results/predicted_speedups.json and .png.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
from results_file import quartiles, rounded, write_result

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.draft import open_draft
from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.candidates import choices, schedules
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.memory import step_memory
from moe_jax.plan.rates import with_rates

CLUSTERS = ("rtx3090x16", "rtx2080tix32")
_WIDTHS = (512, 1024, 2048, 4096, 8192)
GRID: Mapping[str, tuple[float, ...]] = {
    "B": (2, 4, 8),
    "f": (1.0, 1.1, 1.2),
    "N": (512, 1024, 2048),
    "M": _WIDTHS,
    "H": _WIDTHS,
}
BASES = ("vanilla", "expert_pipeline")


def layers(devices: int) -> Iterator[Config]:
    """Yield one block on a mesh of expert ranks for each point of the grid."""
    for sequences in GRID["B"]:
        for values in itertools.product(*list(GRID.values())[1:]):
            yield _layer(devices, int(sequences), values[0], *map(int, values[1:]))


def _layer(devices: int, sequences: int, capacity_factor: float, tokens: int, width: int, hidden: int) -> Config:
    moe = MoEConfig(num_experts=devices, top_k=2, intermediate_size=hidden, capacity_factor=capacity_factor)
    model = ModelConfig(
        vocab_size=256,
        hidden_size=width,
        num_layers=1,
        num_attention_heads=16,
        intermediate_size=hidden,
        activation="gelu",
        moe=moe,
    )
    return Config(
        model=model,
        mesh=MeshConfig(data=1, expert=devices),
        data=DataConfig(seq_len=tokens),
        train=TrainConfig(batch_size=devices * sequences),
    )


def step_seconds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Return the time of each policy at its best degree, with its tasks in the best order for the cluster."""
    config = dataclasses.replace(config, schedule=with_rates(config.schedule, cluster))
    found: dict[str, float] = {}
    for each in choices(open_draft(config), config, ({"schedule": schedule} for schedule in schedules())):
        policy, seconds = each.schedule.policy, estimate(each, cluster).step_s
        found[policy] = min(found.get(policy, seconds), seconds)
    return found


def speedups(cluster: Cluster) -> dict[str, list[float]]:
    """Return the speedups of `unified` over the others, on every layer that fits."""
    found: dict[str, list[float]] = {base: [] for base in BASES}
    for config in layers(cluster.devices):
        if step_memory(config, "gpu", capability=cluster.device.capability).total > (cluster.device.memory_bytes or 0):
            continue
        seconds = step_seconds(config, cluster)
        for base in BASES:
            found[base].append(seconds[base] / seconds["unified"])
    return found


def main() -> None:
    """Simulate all cases and write the results."""
    CommandParser(prog="python profiling/predicted_speedups.py", description=__doc__).parse_args()
    found = {name: speedups(find_cluster(name)) for name in CLUSTERS}
    values: dict[str, Any] = {"grid": GRID}
    for name, of_base in found.items():
        layers = {"layers": len(of_base[BASES[0]])}
        values[name] = layers | {
            f"unified_over_{base}": quartiles(ratios) | {"least": rounded(min(ratios)), "most": rounded(max(ratios))}
            for base, ratios in of_base.items()
        }
    path = write_result("predicted_speedups", values)
    figure, rows = plt.subplots(1, len(found), figsize=(9, 3.5), sharey=True, layout="constrained")
    for axes, (name, of_base) in zip(rows, found.items(), strict=True):
        for base, ratios in of_base.items():
            median = statistics.median(ratios)
            axes.hist(ratios, bins=40, histtype="step", label=f"over {base}, median {median:.2f}")
        axes.set_title(f"{name}, {len(ratios)} layers")
        axes.set_xlabel("predicted speed-up of unified")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    rows[0].set(ylabel="layers", ylim=(0, 1.25 * rows[0].get_ylim()[1]))  # space for legends
    figure.savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    run_command(main)
