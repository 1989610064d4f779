"""Curves as inline SVG, and the style of all plots. Colours are CSS variables of the page, and follow its theme."""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.errors import UserError

MAX_POINTS = 2000  # the most points of a curve
SPANS = 100  # a curve of many records has a strong line through the means of this many spans

# matplotlib draws in these colours, and the CSS variables then replace them in the SVG.
COLORS = {"ink": "#010203", "muted": "#010204", "grid": "#010205", "series-1": "#010206", "series-2": "#010207"}
_STYLE = {
    "axes.edgecolor": COLORS["grid"],
    "axes.grid": True,
    "axes.labelcolor": COLORS["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 7,
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": COLORS["ink"],
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": COLORS["muted"],
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}

Array = NDArray[np.float64]


class PlotError(UserError):
    """A plot cannot be drawn because matplotlib is not installed."""


class PlotLine(NamedTuple):
    """One line of a plot: its steps, its values (NaN: a gap) and its name in the legend."""

    steps: Array
    values: Array
    name: str = ""


_DASHES = ("-", ":", "--", "-.")


def curves_svg(
    title: str, curves: Sequence[PlotLine], percent: bool = False, from_zero: bool = False, log_if_wide: bool = False
) -> str:
    """Draw curves over training steps, as an SVG. Those after the second have its colour and other dashes.

    `percent` labels values as percentages, and `from_zero` starts the axis at 0. With `log_if_wide`, the axis is
    logarithmic if positive values span more than two decades.
    """
    with style():
        from matplotlib.ticker import PercentFormatter

        figure, axes = new_figure(width=4.0, height=2.05, ticks=6)
        for number, curve in enumerate(curves):
            color, dashes = ("series-2", _DASHES[(number - 1) % len(_DASHES)]) if number else ("series-1", _DASHES[0])
            strong = {
                "color": COLORS[color],
                "linewidth": 1.3,
                "label": curve.name,
                "markersize": 3,
                "linestyle": dashes,
            }
            if len(curve.steps) > 3 * SPANS:
                points = thin(curve.steps, MAX_POINTS), thin(curve.values, MAX_POINTS)
                axes.plot(*points, color=COLORS[color], linewidth=0.6, alpha=0.35)
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
        return svg_of(figure, title)


def thin(values: Array, limit: int) -> Array:
    """Reduce values to at most `limit` rows, the means of equal runs of neighbours. A run with a NaN becomes NaN."""
    if len(values) <= limit:
        return values
    return np.stack([part.mean(axis=0) for part in np.array_split(values, limit)])


def style(**changes: object) -> AbstractContextManager[None]:
    """Context with the style of all plots. Raises PlotError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install -e '.[plots]'") from None
    return matplotlib.rc_context(_STYLE | changes)


def new_figure(width: float, height: float, ticks: int) -> tuple[Any, Any]:
    """Return a matplotlib Figure, with width and height in inches, and its axes, whose x values are steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    count_steps(axes, ticks)
    return figure, axes


def count_steps(axes: Any, ticks: int) -> None:
    """Label the x axis with integers, at most about `ticks` of them."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=ticks))
    axes.set_axisbelow(True)


def svg_of(figure: Any, title: str) -> str:
    """Return a figure as SVG text for the page. Must be called within the figure's `style` context."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Unused ids would occur on the page once per plot, and the style element would apply to the whole page.
    names = r' id="[\w.]+_\d+"'
    for noise in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r' xmlns(:\w+)?="[^"]*"', r"<!--.*?-->", names):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', f'<svg role="img" aria-label="{title}"', text, count=1)
    for name, color in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    return text
