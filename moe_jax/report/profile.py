"""A cluster profile as a table of fits, and as a plot of times and efficiencies."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_jax.plan.clusters.measured import ClusterProfile
from moe_jax.plan.curves import Curve, label
from moe_jax.report.plots import PlotError

_PER_SECOND = {"bytes": "GB/s", "flops": "Gflop/s"}
_MARKERS = "osv^D<>pPX*h"


def table(profile: ClusterProfile) -> str:
    """Return a table of every curve's start-up time, rate and r²."""
    width = max(len(curve.label) for curve in profile.curves)
    lines = [f"{'':{width}}   alpha µs        1/beta          best     r²"]
    for curve in profile.curves:
        best = max(amount / s for amount, s in zip(curve.amounts, curve.median_s, strict=True))
        fitted = f"{1 / curve.beta_s / 1e9:9.3g}" if curve.beta_s else "        -"  # the sizes are too small for a fit
        unit = _PER_SECOND[curve.unit]
        lines.append(
            f"{curve.label:{width}}  {1e6 * curve.alpha_s:9.1f}  {fitted}  {best / 1e9:9.3g} {unit:7}"
            f"  {curve.r_squared:5.3f}"
        )
    return "\n".join(lines)


def draw_profile(profile: ClusterProfile, path: Path) -> None:
    """Draw a profile with a column each for collectives, compute and copies, and write it to `path`.

    The upper plots show seconds with quartiles and fitted lines, the lower ones efficiency. Raises PlotError if
    matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install -e '.[plots]'") from None
    columns = _columns(profile.curves)
    figure = Figure(figsize=(5.5 * len(columns), 8), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(columns), sharex="col", squeeze=False)
    for (title, curves), (above, below) in zip(columns.items(), axes.T, strict=True):
        above.set_title(title, loc="left")
        names, settings = (list(dict.fromkeys(each)) for each in zip(*map(_kind, curves), strict=True))
        colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
        markers = {setting: _MARKERS[i % len(_MARKERS)] for i, setting in enumerate(settings)}
        for curve in curves:
            name, setting = _kind(curve)
            _draw(curve, above, below, color=colors[name], marker=markers[setting])
        above.set(xscale="log", yscale="log", ylabel="seconds (bars: quartiles, dashed: alpha-beta)")
        below.set(xscale="log", ylim=(0, 1.05), xlabel=curves[0].unit, ylabel="efficiency: rate over the best")
        # entries for operations and for settings: all pairs of them would hide the curves
        entries = [below.plot([], [], color=color, label=name)[0] for name, color in colors.items()]
        entries += [
            below.plot([], [], color="0.4", marker=marker, markersize=3, linestyle="none", label=setting)[0]
            for setting, marker in markers.items()
            if setting
        ]
        below.legend(handles=entries, fontsize=6, frameon=False)
        for axis in (above, below):
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _columns(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the curves grouped by column, without empty columns. Curves of a column share an axis."""
    kinds: dict[str, Callable[[Curve], bool]] = {
        "collectives": lambda curve: "ranks" in curve.settings,
        "compute": lambda curve: curve.unit == "flops",
        "copies": lambda curve: curve.name == "copy",
    }
    found = {title: list(filter(holds, curves)) for title, holds in kinds.items()}
    return {title: chosen for title, chosen in found.items() if chosen}


def _kind(curve: Curve) -> tuple[str, str]:
    """Return a curve's operation, which has a colour, and its settings, which have a marker."""
    return curve.name, label("", curve.settings).strip()


def _draw(curve: Curve, above: Any, below: Any, **style: str) -> None:
    spread = [
        [m - q for m, q in zip(curve.median_s, curve.first_quartile_s, strict=True)],
        [q - m for m, q in zip(curve.median_s, curve.third_quartile_s, strict=True)],
    ]
    above.errorbar(curve.amounts, curve.median_s, yerr=spread, linestyle="none", markersize=3, **style)
    modelled = [curve.line.seconds(amount) for amount in curve.amounts]
    above.plot(curve.amounts, modelled, "--", linewidth=0.8, color=style["color"])
    below.plot(curve.amounts, curve.efficiency, linewidth=1, markersize=3, **style)
