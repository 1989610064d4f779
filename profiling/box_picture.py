"""Pictures of the measurements of a network testbed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from moe_jax.measure.trace import TracedOperation

_COLORS = {"F": "#4c8bd6", "B": "#7a5fc0", "W": "#3f9e73", "P": "#c9a227", "G": "#d98a2b", "": "#b5b3ac"}
_MEANINGS = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "P": "gathers of parameters",
    "G": "gradient sums",
    "": "optimizer and other",
}
_LANES = ("communication", "compute")


def write_picture(result: dict[str, Any], path: Path) -> Path:
    """Draw bars of seconds per step with their quartiles, and the two lower bounds as lines."""
    rows = result["variants"]
    names = list(reversed(rows))
    median = [rows[name]["step_s"]["median"] for name in names]
    spread = [
        [rows[name]["step_s"]["median"] - rows[name]["step_s"]["first_quartile"] for name in names],
        [rows[name]["step_s"]["third_quartile"] - rows[name]["step_s"]["median"] for name in names],
    ]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.36 * len(names)))
    bars = axes.barh(names, median, xerr=spread, color=_COLORS["F"], height=0.65, error_kw={"ecolor": "#333333"})
    axes.bar_label(bars, fmt=" %.2f s", label_type="edge", fontsize=8, padding=4)
    for key, style in (("compute_alone_s", "-"), ("communication_alone_s", "--")):
        label = key.removesuffix("_s").replace("_", " ")
        axes.axvline(result[key]["median"], color="#c0392b", linestyle=style, linewidth=1.2, label=label)
    axes.set_xlabel(f"seconds per step, links of {result['rate_mbit']:.0f} Mbit/s")
    axes.set_xlim(0, 1.15 * max(median))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8)
    return _saved(figure, path)


def write_timelines(timelines: dict[str, Sequence[TracedOperation]], path: Path) -> Path:
    """Draw the computations and collectives of one step per variant, one plot above the other, on one time scale."""
    figure, axes = plt.subplots(
        len(timelines), figsize=(11, 0.6 + 1.05 * len(timelines)), sharex=True, squeeze=False, layout="constrained"
    )
    for (name, operations), axis in zip(timelines.items(), axes[:, 0], strict=True):
        spans: dict[tuple[int, str], list[tuple[float, float]]] = {}  # one artist per kind: there are thousands
        for each in operations:
            kind = 0 if each.communicates else 1, _COLORS[each.task[:1]]
            spans.setdefault(kind, []).append((each.start_s, each.end_s - each.start_s))
        for (lane, color), own in spans.items():
            axis.broken_barh(own, (lane + 0.1, 0.8), color=color, linewidth=0)
        axis.set_yticks([0.5, 1.5], _LANES, fontsize=8)
        axis.set_ylim(0, 2)
        axis.set_title(name, loc="left", fontsize=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(length=0)
    axes[-1, 0].set_xlabel("seconds")
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in _COLORS.values()]
    figure.legend(patches, _MEANINGS.values(), loc="outside upper right", ncols=len(patches), frameon=False, fontsize=8)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return path
