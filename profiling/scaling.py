"""Plans of models for 1 to 6,144 chips: python profiling/scaling.py

Each case is the choice of `python -m moe_jax.plan --model MODEL --cluster CLUSTER SETTINGS`. Takes minutes. Writes
results/scaling.json and .png, which docs/scaling.md shows.
"""

import math
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from planned_model import draft_of, plan_command
from results_file import rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.planner import plan


class Case(NamedTuple):
    """A model on a cluster."""

    model: str  # name in configs/models
    cluster: str
    settings: tuple[str, ...]


CASES = (
    Case("gpt2_tiny_moe", "v5e-1", ("train.batch_size=8",)),
    Case("olmoe", "v5p-8", ("train.batch_size=64",)),
    Case("mixtral_8x7b", "v5p-64", ("train.batch_size=256",)),
    Case("deepseek_v2", "v5p-512", ("train.batch_size=1024",)),
    Case("deepseek_v3", "v5p-2048", ("train.batch_size=4096",)),
    Case("kimi_k2", "v5p-6144", ("train.batch_size=6144", "exchange.rank_capacity_factor=1.5")),
)
_COLORS = {"data": "#4c78a8", "expert": "#f2a541", "pipeline": "#e45756", "tensor": "#54a24b", "context": "#b279a2"}


def planned(case: Case) -> dict[str, Any]:
    """Return the best plan, and the duration of the search."""
    found = plan(draft_of(case.model, case.settings), find_cluster(case.cluster))
    best, schedule = found.best, found.config.schedule
    return {
        "command": plan_command(*case),
        "chips": found.cluster.devices,
        "mesh": {axis: size for axis, size in found.config.mesh.sizes.items() if size > 1},
        "experts_over_context": found.config.mesh.experts_over_context,
        "policy": schedule.policy,
        "microbatches": schedule.microbatches,
        "pipeline": schedule.pipeline if found.config.step_facts.has_ticks else None,
        "remat": schedule.remat,
        "parts": found.config.train.grad_accumulation,
        "zero": found.config.optimizer.zero,
        "step_s": rounded(best.estimate.step_s),
        "mfu": rounded(best.estimate.mfu),
        "exposed": rounded(best.estimate.busy.exposed / best.estimate.step_s),
        "idle": rounded(best.estimate.busy.idle / best.estimate.step_s),
        "memory_gb": rounded(best.memory.total / 1e9),
        "binds": best.bottleneck,
        "meshes": len(found.ranked) + len(found.refused),
    }


def draw(found: dict[str, dict[str, Any]]) -> Any:
    """Draw the axes of each mesh, as shares of the logarithm of the chips, over the model FLOP utilisation."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 4.2), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    names = [f"{name}\n{each['chips']:,} chip{'s' if each['chips'] > 1 else ''}" for name, each in found.items()]
    for place, each in enumerate(found.values()):
        height = 0.0
        for axis, size in each["mesh"].items():
            above.bar(place, math.log2(size), bottom=height, color=_COLORS[axis], width=0.7)
            above.text(place, height + math.log2(size) / 2, f"{axis} {size}", ha="center", va="center", fontsize=7)
            height += math.log2(size)
    above.set(ylabel="log2 of chips along each axis", title="Planned meshes")
    below.bar(names, [100 * each["mfu"] for each in found.values()], color="#7f9ab8", width=0.7)
    below.set(ylabel="predicted MFU, %")
    below.tick_params(axis="x", labelsize=7)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Plan all cases and write the results."""
    CommandParser(prog="python profiling/scaling.py", description=__doc__).parse_args()
    found = {case.model: planned(case) for case in CASES}
    path = write_result("scaling", {"plans": found})
    draw(found).savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    run_command(main)
