"""The load of experts and of ranks, from a run's records, and its plots: heat maps for experts and a curve for ranks,
with the steps at which experts changed ranks.

On the page each plot is a separate SVG. `load_figure` draws all of them in one figure, for notebooks.

Sizes: R records with loads, M blocks with experts, E experts, L checks of the ranks' load (docs/migration.md).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.report.numbers import Records, ReportError, records_of
from moe_jax.report.plots import COLORS, Array, count_steps, new_figure, style, svg_of, thin


class RankMove(NamedTuple):
    """Experts that changed ranks at a step.

    A load is that of the busiest rank / mean of all ranks, in the worst of the blocks with moved experts.
    """

    step: int
    blocks: tuple[int, ...]
    pairs: int  # pairs of experts that swapped places
    before: float  # load over the steps up to this one
    planned: float
    after: float | None  # load over the steps up to the next check; None: there has been no check yet


class Loads(NamedTuple):
    """The loads of a run, relative to an even load. Arrays are empty if no record has their values."""

    step_R: Array
    expert_RME: Array
    check_L: Array  # steps of the checks
    rank_LM: Array  # load of the busiest rank, over the steps since the previous check
    moves: tuple[RankMove, ...]


def loads_of(records: Records) -> Loads:
    """Return the loads in a run's records."""
    with_experts = [record for record in records if record.get("expert_load")]
    checks = [record for record in records if record.get("rank_load")]
    share_RME = _array([record["expert_load"] for record in with_experts])
    return Loads(
        step_R=_array([record["step"] for record in with_experts]),
        expert_RME=share_RME * share_RME.shape[-1],
        check_L=_array([check["step"] for check in checks]),
        rank_LM=_array([check["rank_load"] for check in checks]),
        moves=tuple(_move(checks[i:]) for i, check in enumerate(checks) if "migrated_blocks" in check),
    )


def _array(values: Sequence[object]) -> Array:
    return np.array(values, dtype=np.float64)


def _move(checks: Records) -> RankMove:
    """Return the move after the first of these checks."""
    blocks = tuple(checks[0]["migrated_blocks"])
    before, *after = (max(check["rank_load"][block] for block in blocks) for check in checks[:2])
    return RankMove(
        step=checks[0]["step"],
        blocks=blocks,
        pairs=sum(checks[0]["migration_swaps"]),
        before=before,
        planned=max(checks[0]["migration_load_after"]),
        after=after[0] if after else None,
    )


MAX_COLUMNS = 400  # columns of a heat map
MAX_WINDOWS = 400  # points of the ranks' curve, each for the steps between two checks of their load
LOAD_LIMIT = 2.0  # load / even share that has the full colour
# Colours from too little over even to too much load. The middle is transparent: even load shows the page's background.
_COLORS = [(0.13, 0.42, 0.85, 1.0), (0.13, 0.42, 0.85, 0.0), (0.92, 0.36, 0.10, 0.0), (0.92, 0.36, 0.10, 1.0)]
_NO_GRID = {"axes.grid": False}
_MANY = 24  # with more blocks than this a row of heat maps is longer
_TITLED = 2  # the most moves in a title
_BAR_INCHES = 2.5


def experts_svg(loads: Loads, block: int) -> str:
    """Draw the load of one block's experts as an SVG: x is the step, y the expert."""
    with style(**_NO_GRID):
        figure, axes = new_figure(width=2.5, height=1.6, ticks=4)
        _draw_experts(axes, loads, block)
        return svg_of(figure, f"Expert load, block {block}")


def ranks_svg(loads: Loads) -> str:
    """Draw the load of the busiest rank over training steps, for all blocks, as an SVG."""
    with style():
        figure, axes = new_figure(width=8.2, height=2.05, ticks=12)
        _draw_ranks(axes, loads, COLORS["series-1"])
        axes.set_xlabel("step")
        figure.legend(loc="outside upper right", ncols=3)
        return svg_of(figure, "Load of the busiest rank")


def load_figure(run: Path) -> Any:
    """Draw the load of ranks and of all experts in one matplotlib Figure, which notebooks show.

    Raises MetricsError (no such run, damaged records), ReportError (no records, or a dense run), or PlotError
    (matplotlib is not installed).
    """
    loads = loads_of(records_of(run))
    if not len(loads.step_R):
        raise ReportError(
            f"run {run} has no records of experts: wait until it has trained for log.every steps, or name a run whose "
            "model has experts"
        )
    with style(**_NO_GRID):
        return _drawn(loads)


def _drawn(loads: Loads) -> Any:
    from matplotlib.figure import Figure

    blocks, has_ranks = loads.expert_RME.shape[1], len(loads.check_L) > 0
    columns = min(blocks, 4 if blocks <= _MANY else 6)
    rows = math.ceil(blocks / columns)
    heights = [1.8] * has_ranks + [1.5 * rows + 0.6]
    figure = Figure(figsize=(max(2.2 * columns + 1, 6), sum(heights)), dpi=200, layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if has_ranks:
        axes = parts[0].subplots()
        count_steps(axes, ticks=12)
        _draw_ranks(axes, loads, "C0")
        axes.set(xlabel="step", ylabel="busiest rank / mean", title=_moves_title(loads))
        parts[0].legend(loc="outside right upper")
    panels = parts[-1].subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[blocks:]:
        axes.remove()
    for block, axes in enumerate(panels.flat[:blocks]):
        count_steps(axes, ticks=4)
        image = _draw_experts(axes, loads, block)
        axes.set_title(f"MoE block {block}")
        if block + columns >= blocks:  # the lowest one in its column
            axes.set_xlabel("step")
            axes.tick_params(labelbottom=True)
    parts[-1].supylabel("expert", fontsize=7)
    parts[-1].colorbar(
        image,
        ax=list(panels.flat[:blocks]),
        location="bottom",
        shrink=_BAR_INCHES / figure.get_figwidth(),
        aspect=30,
        extend="max",
        ticks=[0, 1, LOAD_LIMIT],
        label="load / even share",
    )
    return figure


def load_gradient() -> str:
    """Return the colours of the heat maps as a CSS gradient, for the legend."""
    stops = ", ".join(f"rgb({r:.0%} {g:.0%} {b:.0%} / {a:.0%})" for r, g, b, a in _COLORS)
    return f"linear-gradient(to right, {stops.replace('/ 0%)', '/ 0%) 50%')})"


def _moves_title(loads: Loads) -> str:
    """Return the load of the busiest rank before and after each of the last moves."""

    def text(move: RankMove) -> str:
        after = f"{move.planned:.2f} (planned)" if move.after is None else f"{move.after:.2f}"
        return f"{move.before:.2f} → {after} at step {move.step:,}"

    return ", ".join(map(text, loads.moves[-_TITLED:]))


def _draw_experts(axes: Any, loads: Loads, block: int) -> Any:
    """Draw a heat map of at most MAX_COLUMNS columns, each the mean of neighbouring records."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    step_R, load_RE = thin(loads.step_R, MAX_COLUMNS), thin(loads.expert_RME[:, block], MAX_COLUMNS)
    image = axes.pcolormesh(
        _edges(step_R),
        np.arange(load_RE.shape[1] + 1) - 0.5,
        load_RE.T,
        cmap=LinearSegmentedColormap.from_list("load", list(zip((0, 0.5, 0.5, 1), _COLORS, strict=True))),
        vmin=0,
        vmax=LOAD_LIMIT,
        rasterized=True,
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=6))
    _mark(axes, [move.step for move in loads.moves if block in move.blocks])
    return image


def _edges(step_R: Array) -> Array:
    middles = (step_R[1:] + step_R[:-1]) / 2
    half = (step_R[1] - step_R[0]) / 2 if len(step_R) > 1 else 0.5
    return np.concatenate([[step_R[0] - half], middles, [step_R[-1] + half]])


def _draw_ranks(axes: Any, loads: Loads, color: str) -> None:
    """Draw the worst block's load between two checks, and the range of all blocks from the best to the worst."""
    windows = min(len(loads.check_L), MAX_WINDOWS)
    ends = [part[-1] for part in np.array_split(loads.check_L, windows)]
    start = max(2 * ends[0] - ends[1], 0.0) if windows > 1 else 0.0
    rank_LM = thin(loads.rank_LM, windows)
    best, worst = rank_LM.min(axis=1), rank_LM.max(axis=1)
    if rank_LM.shape[1] > 1:
        axes.stairs(worst, [start, *ends], baseline=best, fill=True, color=color, alpha=0.25, label="all blocks")
    axes.stairs(worst, [start, *ends], baseline=None, color=color, linewidth=1.3, label="worst block")
    axes.set_ylim(bottom=1)
    axes.set_xlim(0, max([*loads.step_R[-1:], loads.check_L[-1]]))
    _mark(axes, [move.step for move in loads.moves])


def _mark(axes: Any, steps: list[int]) -> None:
    """Draw a line at each step at which experts changed ranks."""
    for number, step in enumerate(steps):
        label = "experts changed ranks" if number == 0 else None
        axes.axvline(step, color=COLORS["ink"], linewidth=0.8, linestyle="--", label=label)
