"""What a box says of ways to exchange: measured times, those that lines fitted inside and between nodes predict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from moe_jax.plan.curves import Curve


class Phase(NamedTuple):
    """A collective over the two ranks of a node, or over two nodes by all their ranks at once."""

    name: str
    between: bool
    share: float  # of the bytes that a rank exchanges in all


# Two nodes of two ranks: of a rank's four blocks two stay in its node. One after another, as XLA:CPU runs them; what is
# inside a node hides beside what leaves it where both are one collective. A permute's line is that of both ranks of a
# node sending: a hop in which one of them does takes half of the bytes.
PHASES: dict[str, Sequence[Phase]] = {
    "flat": [Phase("all_to_all.flat", True, 1)],
    "background": [Phase("all_to_all.background", True, 1)],
    "ring": [Phase("permute", True, 1 / 8), Phase("permute", True, 1 / 4), Phase("permute", True, 1 / 8)],
    "hier_1d": [Phase("permute", False, 1 / 2), Phase("permute", True, 1 / 2), Phase("permute", False, 1 / 2)],
    "hier_2d": [Phase("all_to_all.flat", False, 1), Phase("all_to_all.flat", True, 1)],
    "halo": [
        Phase("permute", True, 1 / 2),
        Phase("all_to_all.flat", False, 1 / 2),
        Phase("all_to_all.flat", False, 1 / 2),
    ],
}
WITHIN = 1.05  # of the best is as good as the best


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Of each algorithm over all ranks, what was measured and predicted at each size; of every collective, its fit."""
    ranks = max(curve.settings["ranks"] for curve in curves)
    exchanges = {
        curve.name.partition(".")[2]: curve
        for curve in curves
        if curve.name.startswith("all_to_all.") and curve.settings["ranks"] == ranks
    }
    lines = {
        (curve.name, curve.settings["stride"] > 1): curve.line for curve in curves if curve.settings["ranks"] < ranks
    }
    sizes = next(iter(exchanges.values())).amounts
    predicted = {
        name: [
            sum(lines[phase.name, phase.between].seconds(phase.share * size) for phase in PHASES[name])
            for size in sizes
        ]
        for name in exchanges
        if name in PHASES
    }
    chosen = [min(predicted, key=lambda name: predicted[name][i]) for i in range(len(sizes))]
    fastest = [min(exchanges, key=lambda name: exchanges[name].median_s[i]) for i in range(len(sizes))]
    return {
        "sizes_bytes": list(sizes),
        "algorithms": {
            name: {
                "median_s": _rounded(curve.median_s),
                "first_quartile_s": _rounded(curve.first_quartile_s),
                "third_quartile_s": _rounded(curve.third_quartile_s),
                "predicted_s": _rounded(predicted[name]) if name in predicted else None,
            }
            for name, curve in exchanges.items()
        },
        "chosen_by_model": chosen,
        "fastest": fastest,
        "chosen_over_fastest": _rounded(
            [
                exchanges[a].median_s[i] / exchanges[b].median_s[i]
                for i, (a, b) in enumerate(zip(chosen, fastest, strict=True))
            ]
        ),
        "fits": [
            {
                "collective": curve.name,
                "where": _where(curve, ranks),
                "alpha_s": float(f"{curve.alpha_s:.4g}"),
                "beta_s_per_byte": float(f"{curve.beta_s:.4g}"),
                "r_squared": round(curve.r_squared, 5),
            }
            for curve in curves
        ],
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _where(curve: Curve, ranks: int) -> str:
    if curve.settings["ranks"] == ranks:
        return "over all ranks"
    return "between nodes" if curve.settings["stride"] > 1 else "inside a node"


def table(result: dict[str, Any]) -> str:
    """The summary as text: milliseconds, measured and (predicted)."""
    names, sizes = result["algorithms"], result["sizes_bytes"]
    lines = [f"{'ms (predicted)':>14}" + "".join(f"{name:>19}" for name in names) + "   chosen by model  / fastest"]
    for i, size in enumerate(sizes):
        cells = []
        for row in names.values():
            guess = f"({1e3 * row['predicted_s'][i]:.1f})" if row["predicted_s"] else "(-)"
            cells.append(f"{1e3 * row['median_s'][i]:9.1f} {guess:>9}")
        choice = f"{result['chosen_by_model'][i]:>16}  {result['chosen_over_fastest'][i]:.3f} × {result['fastest'][i]}"
        lines.append(f"{size / 1024:11.0f} kB" + "".join(cells) + "  " + choice)
    for fit in result["fits"]:
        rate = 1e-6 / fit["beta_s_per_byte"] if fit["beta_s_per_byte"] else float("inf")
        what = f"{fit['collective']} {fit['where']}"
        lines.append(f"{what:40} {1e3 * fit['alpha_s']:7.2f} ms + bytes / {rate:6.1f} MB/s   r² {fit['r_squared']:.4f}")
    return "\n".join(lines)


def write_picture(result: dict[str, Any], path: Path) -> Path:
    """Measured times with quartiles over those of the fastest, and predicted ones dashed."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    sizes = result["sizes_bytes"]
    best = [min(row["median_s"][i] for row in result["algorithms"].values()) for i in range(len(sizes))]
    for i, (name, row) in enumerate(result["algorithms"].items()):
        median, first, third = (
            [value / least for value, least in zip(row[key], best, strict=True)]
            for key in ("median_s", "first_quartile_s", "third_quartile_s")
        )
        spread = [
            [m - q for m, q in zip(median, first, strict=True)],
            [q - m for m, q in zip(median, third, strict=True)],
        ]
        axes.errorbar(sizes, median, yerr=spread, color=f"C{i}", marker="o", markersize=4, capsize=2, label=name)
        if row["predicted_s"]:
            axes.plot(sizes, [p / b for p, b in zip(row["predicted_s"], best, strict=True)], "--", color=f"C{i}")
    axes.set(xscale="log", xlabel="bytes that a rank exchanges", ylabel="time over the fastest algorithm's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="dashed: alpha-beta model")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
