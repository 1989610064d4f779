"""Summary of exchange benchmarks: measured times, and those predicted by lines fitted inside nodes and between them."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from moe_jax.parallel.all_to_all import BY_NODE
from moe_jax.plan.curves import Curve
from moe_jax.plan.exchange import ALGORITHMS, Links, exchange_seconds, ring_seconds
from moe_jax.plan.task_times import Linear

NODES, RANKS_PER_NODE = 2, 2
_PLACES = {"inside": "inside a node", "between": "between nodes", "all": "over all ranks"}
Lines = Mapping[tuple[str, str], Linear]  # by collective, and "inside" or "between"


def predicted_seconds(algorithm: str, num_bytes: float, lines: Lines) -> float | None:
    """Predict seconds by `plan.exchange` and the fitted lines of an algorithm's phases.

    Returns None if the algorithm has no closed form. Exchanges in the background send the same messages as flat ones,
    over sockets of their own.
    """
    if algorithm == "ring":
        return ring_seconds(num_bytes, NODES, RANKS_PER_NODE, _links("all_to_all.flat", lines))
    form, made_of = ("flat", algorithm) if algorithm == "background" else (algorithm, "flat")
    if form not in ALGORITHMS:
        return None
    return exchange_seconds(form, num_bytes, NODES, RANKS_PER_NODE, _links(f"all_to_all.{made_of}", lines))


def _links(name: str, lines: Lines) -> Links:
    """Return the cost of one message: an all-to-all over n ranks sends n - 1 of them, each 1/n of its operand.

    Between nodes, the line was measured with all ranks of a node sending, which share the node's link.
    """
    inside, between = lines[name, "inside"], lines[name, "between"]
    to_others, messages = RANKS_PER_NODE - 1, RANKS_PER_NODE * (NODES - 1)
    return Links(
        inside=Linear(inside.alpha_s / to_others, inside.beta_s * RANKS_PER_NODE / to_others),
        between=Linear(between.alpha_s / messages, between.beta_s * NODES / messages),
        ranks_per_adapter=RANKS_PER_NODE,
    )


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return measured and predicted times of each algorithm over all ranks, and the fit of every collective."""
    exchanges = {
        curve.name.partition(".")[2]: curve
        for curve in curves
        if curve.name.startswith("all_to_all.") and _where(curve) == "all"
    }
    lines = {(curve.name, _where(curve)): curve.line for curve in curves}
    sizes = next(iter(exchanges.values())).amounts
    known = {name: [predicted_seconds(name, size, lines) for size in sizes] for name in exchanges}
    predicted = {name: [s for s in seconds if s is not None] for name, seconds in known.items() if None not in seconds}
    chosen = [min(exchanges, key=lambda name: exchanges[name].line.seconds(size)) for size in sizes]
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
        "ahead_of_flat_by_closed_forms": _ahead_of_flat(predicted, sizes),
        "ahead_of_flat_as_measured": _ahead_of_flat({name: c.median_s for name, c in exchanges.items()}, sizes),
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
                "where": _where(curve),
                "alpha_s": float(f"{curve.alpha_s:.4g}"),
                "beta_s_per_byte": float(f"{curve.beta_s:.4g}"),
                "r_squared": round(statistics.correlation(curve.amounts, curve.median_s) ** 2, 5),
                "r_squared_of_relative_errors": round(curve.r_squared, 5),
                "median_s": _rounded(curve.median_s),
            }
            for curve in curves
        ],
    }


def _ahead_of_flat(seconds: Mapping[str, Sequence[float]], sizes: Sequence[float]) -> list[str]:
    """List the node-aware exchanges that take less time than the flat one."""
    return [
        f"{name} at {size:.0f} bytes"
        for name in BY_NODE
        for i, size in enumerate(sizes)
        if name in seconds and "flat" in seconds and seconds[name][i] < seconds["flat"][i]
    ]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _where(curve: Curve) -> str:
    if curve.settings["stride"] > 1:
        return "between"
    return "inside" if curve.settings["ranks"] == RANKS_PER_NODE else "all"


def table(result: dict[str, Any]) -> str:
    """Format the summary as text: milliseconds, measured and (predicted)."""
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
        what = f"{fit['collective']} {_PLACES[fit['where']]}"
        fits = f"r² {fit['r_squared']:.4f}, of relative errors {fit['r_squared_of_relative_errors']:.4f}"
        lines.append(f"{what:40} {1e3 * fit['alpha_s']:7.2f} ms + bytes / {rate:6.1f} MB/s   {fits}")
    for name in ("ahead_of_flat_by_closed_forms", "ahead_of_flat_as_measured"):
        lines.append(f"{name.replace('_', ' ')}: {', '.join(result[name]) or 'none'}")
    return "\n".join(lines)


def write_picture(result: dict[str, Any], path: Path) -> Path:
    """Draw measured times with quartiles, relative to the fastest, and those of closed forms as dashed lines."""
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
    axes.legend(
        frameon=False,
        title="dashed: closed forms",
        ncols=len(result["algorithms"]),
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
