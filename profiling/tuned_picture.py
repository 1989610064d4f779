"""Pictures of tuning: times of all sizes, how fast each search method finds the best, and a run that tunes itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from tuned_replay import WITHIN

_COLORS = {"search": "#2a6fd0", "grid": "#d9541e", "random": "#8a8880"}
_SEARCHING = "#eef3fb"


def write_picture(result: Mapping[str, Any], path: Path) -> Path:
    """Draw all three parts."""
    figure = plt.figure(figsize=(11, 7.5), layout="constrained")
    parts = figure.add_gridspec(3, 2, height_ratios=[3, 2, 2])
    _sizes(figure.add_subplot(parts[0, 0]), result["sweep"])
    _regrets(figure.add_subplot(parts[0, 1]), result["replay"])
    above = figure.add_subplot(parts[1, :])
    _run(above, figure.add_subplot(parts[2, :], sharex=above), result["live"])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _sizes(axes: Any, sweep: Mapping[str, Any]) -> None:
    sizes, rows = sweep["bucket_cap_mb"], sweep["step_s"]
    median = [row["median"] for row in rows]
    axes.fill_between(
        sizes,
        [row["first_quartile"] for row in rows],
        [row["third_quartile"] for row in rows],
        color=_COLORS["search"],
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(sizes, median, color=_COLORS["search"], marker="o", markersize=3)
    near = (1 + WITHIN) * min(median)
    axes.axhline(near, color="#333333", linestyle=":", linewidth=1, label=f"{100 * WITHIN:g} % above the best")
    axes.set(
        xscale="log", xlabel="bucket size, MB", ylabel="seconds per step", title="every size, medians and quartiles"
    )
    axes.legend(frameon=False)


def _regrets(axes: Any, replay: Mapping[str, Mapping[str, Any]]) -> None:
    for name, row in replay.items():
        samples = range(1, len(row["mean"]) + 1)
        axes.plot(
            samples, [100 * each for each in row["mean"]], color=_COLORS[name], marker="o", markersize=3, label=name
        )
        axes.plot(
            samples, [100 * each for each in row["ninth_decile"]], color=_COLORS[name], linestyle=":", linewidth=1
        )
    axes.axhline(100 * WITHIN, color="#333333", linestyle=":", linewidth=1)
    axes.set_yscale("symlog", linthresh=10)  # the first samples are off by hundreds of percent, the last by a few
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="samples", ylabel="% slower than the best size", ylim=(0, None))
    axes.set_title("best so far; dotted: 9 of 10 seeds are better")
    axes.legend(frameon=False)


def _run(times: Any, sizes: Any, live: Mapping[str, Any]) -> None:
    steps = [step for step, _ in live["step_s"]]
    times.plot(steps, [seconds for _, seconds in live["step_s"]], color="#333333", linewidth=0.7)
    tried = live["tried"]
    sizes.plot([step for step, _, _ in tried], [mb for _, mb, _ in tried], "o", color=_COLORS["grid"], label="tried")
    chosen = live["chosen"]
    if chosen:
        ends = [*chosen, [steps[-1], chosen[-1][1], None]]
        sizes.step(
            [step for step, _, _ in ends],
            [mb for _, mb, _ in ends],
            where="post",
            color=_COLORS["search"],
            label="chosen",
        )
    for axes in (times, sizes):
        for first, last in live["searches"]:
            axes.axvspan(first, last, color=_SEARCHING, zorder=0)
        if live["changed_at"] is not None:
            axes.axvline(live["changed_at"], color="#c0392b", linestyle="--", linewidth=1.2)
    before, after = live["rates_mbit"]
    times.set(
        ylabel="seconds per step", title=f"a run that tunes itself (shaded); links of {before:g}, then {after:g} Mbit/s"
    )
    times.set_ylim(0, 1.1 * sorted(seconds for _, seconds in live["step_s"])[int(0.98 * len(steps))])
    sizes.set(yscale="log", xlabel="step", ylabel="bucket size, MB")
    sizes.yaxis.set_major_locator(LogLocator(base=4))
    sizes.yaxis.set_major_formatter("{x:g}")
    sizes.yaxis.set_minor_locator(NullLocator())
    sizes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
