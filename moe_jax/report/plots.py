"""Curves and expert-load panels as inline SVG whose colours are the page's CSS variables, so they follow its theme."""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.errors import UserError

MAX_POINTS = 2000  # of a curve
MAX_COLUMNS = 400  # of an expert-load panel
SPANS = 100  # whose means are the strong line through a curve of many records

# matplotlib draws in these colours; the SVG then names the variable instead.
_COLORS = {"ink": "#010203", "muted": "#010204", "grid": "#010205", "series-1": "#010206", "series-2": "#010207"}
_STYLE = {
    "axes.edgecolor": _COLORS["grid"],
    "axes.grid": True,
    "axes.labelcolor": _COLORS["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 7,
    "grid.color": _COLORS["grid"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": _COLORS["ink"],
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.color": _COLORS["ink"],
    "xtick.color": _COLORS["muted"],
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": _COLORS["muted"],
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
# Too little, even, too much: transparent in the middle, so that even load is the page's own background.
_LOAD_COLORS = [(0.13, 0.42, 0.85, 1.0), (0.13, 0.42, 0.85, 0.0), (0.92, 0.36, 0.10, 0.0), (0.92, 0.36, 0.10, 1.0)]
LOAD_LIMIT = 2.0  # times the even share, at full colour

Array = NDArray[np.float64]


class PlotError(UserError):
    """Plots were asked for and matplotlib is not installed."""


class Curve(NamedTuple):
    """One line of a plot: its steps, its values (NaN: a gap) and what the legend calls it."""

    steps: Array
    values: Array
    name: str = ""


def curves_svg(
    title: str, curves: Sequence[Curve], percent: bool = False, from_zero: bool = False, log_if_wide: bool = False
) -> str:
    """Up to two curves over training steps; `log_if_wide`: on a logarithmic axis if they span two decades."""
    with _style():
        from matplotlib.ticker import PercentFormatter

        figure, axes = _figure(width=4.0, height=2.05, ticks=6)
        for curve, color in zip(curves, ("series-1", "series-2"), strict=False):
            strong = {"color": _COLORS[color], "linewidth": 1.3, "label": curve.name, "markersize": 3}
            if len(curve.steps) > 3 * SPANS:
                points = thin(curve.steps, MAX_POINTS), thin(curve.values, MAX_POINTS)
                axes.plot(*points, color=_COLORS[color], linewidth=0.6, alpha=0.35)
                axes.plot(thin(curve.steps, SPANS), thin(curve.values, SPANS), **strong)
            else:
                axes.plot(curve.steps, curve.values, marker="o" if len(curve.steps) <= 40 else None, **strong)
        axes.set_xlabel("step")
        if len(curves) > 1:
            axes.legend()
        drawn = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
        if log_if_wide and len(drawn) and drawn.min() > 0 and drawn.max() > 100 * drawn.min():
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_formatter(PercentFormatter(1) if percent else "{x:,.10g}")
            if from_zero:
                axes.set_ylim(bottom=0)
        return _svg(figure, title)


def load_svg(title: str, steps: Array, load: Array, marks: Sequence[float] = ()) -> str:
    """Expert load [record, expert] of one block, 1 = even, as one small panel: x step, y expert; lines at `marks`."""
    steps, load = thin(steps, MAX_COLUMNS), thin(load, MAX_COLUMNS)
    middles = (steps[1:] + steps[:-1]) / 2
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 else 0.5
    edges = np.concatenate([[steps[0] - half], middles, [steps[-1] + half]])
    with _style(**{"axes.grid": False}):
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.ticker import MaxNLocator

        figure, axes = _figure(width=2.5, height=1.6, ticks=4)
        axes.pcolormesh(
            edges,
            np.arange(load.shape[1] + 1) - 0.5,
            load.T,
            cmap=LinearSegmentedColormap.from_list("load", list(zip((0, 0.5, 0.5, 1), _LOAD_COLORS, strict=True))),
            vmin=0,
            vmax=LOAD_LIMIT,
            rasterized=True,
        )
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=6))
        for step in marks:
            axes.axvline(step, color=_COLORS["ink"], linewidth=0.8, linestyle="--")
        return _svg(figure, title)


def load_gradient() -> str:
    """The colours of the panels as CSS, for the legend."""
    stops = ", ".join(f"rgb({r:.0%} {g:.0%} {b:.0%} / {a:.0%})" for r, g, b, a in _LOAD_COLORS)
    return f"linear-gradient(to right, {stops.replace('/ 0%)', '/ 0%) 50%')})"


def thin(values: Array, limit: int) -> Array:
    """At most `limit` rows: means of as many equal runs of neighbours. A NaN stays visible as NaN."""
    if len(values) <= limit:
        return values
    return np.stack([part.mean(axis=0) for part in np.array_split(values, limit)])


def _style(**changes: object) -> AbstractContextManager[None]:
    try:
        import matplotlib
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install 'moe_jax[plots]'") from None
    return matplotlib.rc_context(_STYLE | changes)


def _figure(width: float, height: float, ticks: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=ticks))
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Names that nothing refers to would stand on the page once per plot, and the style would hold for all of it.
    names = r' id="[\w.]+_\d+"'
    for noise in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r' xmlns(:\w+)?="[^"]*"', r"<!--.*?-->", names):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', f'<svg role="img" aria-label="{title}"', text, count=1)
    for name, color in _COLORS.items():
        text = text.replace(color, f"var(--{name})")
    return text
