"""Pictures for the pages in docs/: python profiling/pictures.py

Draws from committed results, from the simulator, and from functions that training uses. Measures nothing. Writes
results/picture_NAME.png.
"""

import json
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from results_file import RESULTS

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.report.compiled import variants_of
from moe_jax.report.timeline import draw, predicted_bars

_RANKS = 4  # context ranks in the picture
_ABOVE, _BELOW = (4, 3), (4, -9)  # of a point, in points: a name


def gates() -> Any:
    """Draw the loss of each gate, and how even its loads are (docs/gates.md)."""
    found = json.loads((RESULTS / "gates.json").read_text())["gates"]
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for name, each in found.items():
        place = each["load_max_over_mean"], each["validation_loss"]
        axes.plot(*place, "o", color="#4c78a8", markersize=4)
        offset = _BELOW if name == "deepseek_v2" else _ABOVE  # xmoe is right above it
        axes.annotate(name, place, xytext=offset, textcoords="offset points", fontsize=7)
    axes.set(xlabel="load of the busiest expert / mean", ylabel="validation loss, nats per byte")
    axes.margins(x=0.12, y=0.1)
    return figure


def migration() -> Any:
    """Draw the load of the busiest rank between load checks; experts move after the second (docs/migration.md)."""
    found = json.loads((RESULTS / "migration.json").read_text())
    looks = found["rank_load_max_over_mean"]
    figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
    steps = [int(step) for step in looks]
    edges = [0, *steps]
    for block, color in enumerate(("#4c78a8", "#f2a541")):
        axes.stairs(
            [loads[block] for loads in looks.values()], edges, baseline=None, color=color, label=f"block {block}"
        )
    for move in found["moves"]:
        axes.axvline(move["step"], color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            "experts change ranks", (move["step"], 2.2), xytext=(4, 0), textcoords="offset points", fontsize=7
        )
    axes.axhline(found["migration"]["threshold"], color="grey", linewidth=0.8, linestyle=":", label="threshold")
    axes.set(xlabel="step", ylabel="busiest rank / mean", ylim=(1, None))
    axes.legend(frameon=False, fontsize=7)
    return figure


def context() -> Any:
    """Draw the pairs of tokens that each context rank computes: rank r has pieces r and 2C-1-r (docs/context.md)."""
    pieces = 2 * _RANKS
    figure, axes = plt.subplots(figsize=(3.6, 3.2), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    counts = [0.0] * _RANKS
    for query in range(pieces):
        rank = min(query, pieces - 1 - query)
        for key in range(query + 1):
            axes.add_patch(plt.Rectangle((key, query), 1, 1, color=colors[rank], alpha=0.45 if key == query else 0.9))
            counts[rank] += 0.5 if key == query else 1.0
    assert len(set(counts)) == 1, "every rank has as much to do"
    for rank in range(_RANKS):
        axes.plot([], [], "s", color=colors[rank], label=f"rank {rank}: pieces {rank}, {pieces - 1 - rank}")
    axes.set(
        xlim=(0, pieces), ylim=(pieces, 0), xlabel="piece of the keys", ylabel="piece of the queries", aspect="equal"
    )
    axes.legend(frameon=False, fontsize=7, loc="upper right")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {"gates": gates, "migration": migration, "context": context}


def main() -> None:
    """Draw all pictures."""
    CommandParser(prog="python profiling/pictures.py", description=__doc__).parse_args()
    for name, picture in PICTURES.items():
        figure = picture()
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(RESULTS / f"picture_{name}.png", dpi=120)
    cluster = find_cluster("h100x8")
    settings = variants_of("vanilla,expert_pipeline,unified", [])
    steps = {name: load_config("configs/bench/fine_grained.yaml", each) for name, each in settings.items()}
    bars = {name: predicted_bars(estimate(config, cluster).timeline) for name, config in steps.items()}
    draw(bars, RESULTS / "picture_schedule.png", "One step of each policy, predicted for eight H100")


if __name__ == "__main__":
    run_command(main)
