"""Errors of predicted step times against measured ones, as plain values, a table and a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullLocator
from results_file import rounded

Row = dict[str, Any]

NEAR = 0.03  # relative to the fastest


def summary(measured: Sequence[Row]) -> Row:
    """Return errors of all rows, and of each case (a model and a rate) the extra time of the best prediction."""
    found = [_row(each) for each in measured]
    cases: dict[tuple[str, float], list[Row]] = {}
    for each in found:
        cases.setdefault((each["model"], each["rate_mbit"]), []).append(each)
    first: dict[str, Row] = {}
    for (model, rate), rows in cases.items():
        chosen = min(rows, key=lambda row: row["predicted_s"])
        fastest = min(rows, key=lambda row: row["measured_s"])
        first[f"{model}, {rate:.0f} Mbit/s"] = {
            "ranked_first": f"{chosen['mesh']}: {chosen['way']}",
            "fastest": f"{fastest['mesh']}: {fastest['way']}",
            "over_fastest": rounded(chosen["measured_s"] / fastest["measured_s"] - 1),
        }
    errors = [abs(row["error"]) for row in found]
    return {
        "configurations": len(found),
        "median_error": rounded(statistics.median(errors)),
        "ninth_decile_of_errors": rounded(float(np.quantile(errors, 0.9))),
        "ranked_first_within_3_percent": rounded(
            statistics.mean(case["over_fastest"] <= NEAR for case in first.values())
        ),
        "cases": first,
        "rows": found,
        "known": _known(measured),
    }


def _known(measured: Sequence[Row]) -> Row:
    """Return the inputs of the predictions: the tasks of each model on each mesh, and the link at each rate."""
    known: Row = {}
    for row in measured:
        own = known.setdefault(f"{row['model']}, {row['mesh']}", {**row["times"], "links": {}})
        own["links"][f"{row['rate_mbit']:.0f}"] = row["link"]
    return known


def _row(row: Row) -> Row:
    predicted_s, measured_s = row["predicted_s"], statistics.median(row["measured_s"])
    values = {"predicted_s": predicted_s, "measured_s": measured_s, "error": predicted_s / measured_s - 1}
    known = {name: row[name] for name in ("model", "mesh", "way", "rate_mbit", "pace")}
    return known | {name: rounded(value) for name, value in values.items()}


def table(result: dict[str, Any]) -> str:
    """Format the summary as text."""
    lines = [f"{'model':18} {'mesh':17} {'way':30} {'Mbit/s':>6} {'predicted':>10} {'measured':>9} {'error':>7}"]
    for row in result["rows"]:
        lines.append(
            f"{row['model']:18} {row['mesh']:17} {row['way']:30} {row['rate_mbit']:6.0f} {row['predicted_s']:9.3f}s "
            f"{row['measured_s']:8.3f}s {row['error']:+7.1%}"
        )
    for name, case in result["cases"].items():
        lines.append(f"{name}: {case['ranked_first']} took {case['over_fastest']:.1%} longer than {case['fastest']}")
    return "\n".join(
        [
            *lines,
            f"{result['configurations']} configurations: median error {result['median_error']:.1%}, "
            f"nine in ten up to {result['ninth_decile_of_errors']:.1%}; ranked first within 3 % of the fastest in "
            f"{result['ranked_first_within_3_percent']:.0%} of {len(result['cases'])} cases",
        ]
    )


def write_picture(result: dict[str, Any], path: Path) -> Path:
    """Draw predicted over measured seconds, one colour for each model, and the band of 5 %."""
    figure, axes = plt.subplots(figsize=(6, 6))
    rows = result["rows"]
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        for mesh, marker in zip(dict.fromkeys(row["mesh"] for row in rows), "os", strict=False):
            own = [row for row in rows if (row["model"], row["mesh"]) == (model, mesh)]
            axes.scatter(
                [row["measured_s"] for row in own],
                [row["predicted_s"] for row in own],
                s=18,
                marker=marker,
                color=f"C{number}",
                alpha=0.8,
                label=f"{model}, {mesh} axis",
            )
    low, high = (limit([row["measured_s"] for row in rows]) for limit in (min, max))
    ends = np.array([0.9 * low, 1.1 * high])
    axes.plot(ends, ends, color="0.3", linewidth=0.8)
    axes.fill_between(ends, 0.95 * ends, 1.05 * ends, color="0.5", alpha=0.2, label="5 %")
    axes.set(xscale="log", yscale="log", xlabel="measured seconds per step", ylabel="predicted seconds per step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=2))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
