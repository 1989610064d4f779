"""The sections of the page that say how ranks and experts are loaded."""

from moe_jax.report.html import plots, table
from moe_jax.report.load_plots import LOAD_LIMIT, experts_svg, load_gradient, ranks_svg
from moe_jax.report.loads import Loads, RankMove

_LISTED = 20  # moves


def rank_section(loads: Loads) -> str:
    """The busiest rank's load over time, and what each move made of it; nothing for a run without looks at it."""
    if not len(loads.look_L):
        return ""
    told = (
        "<p>Load of the busiest rank over the steps between two looks, relative to the mean of all ranks. "
        "Lines: experts changed ranks.</p>\n"
    )
    plot = plots([("Busiest rank / mean load", ranks_svg(loads))], "wide")
    if not loads.moves:
        return told + plot
    left_out = len(loads.moves) - _LISTED
    earlier = f"<p>The last {_LISTED} moves; {left_out} before them.</p>\n" if left_out > 0 else ""
    return told + plot + earlier + table("numbers", map(_row, loads.moves[-_LISTED:]))


def _row(move: RankMove) -> tuple[str, str, str]:
    after = move.planned if move.after is None else move.after
    found = "no look since" if move.after is None else "over the steps up to the next look"
    blocks = f"block{'s' if len(move.blocks) > 1 else ''} {', '.join(map(str, move.blocks))}"
    return (
        f"Step {move.step:,}",
        f"{move.before:.2f} → {after:.2f}",
        f"planned {move.planned:.2f}, {found}; {move.pairs} pair(s) of experts changed ranks in MoE {blocks}",
    )


def expert_section(loads: Loads) -> str:
    """A heat map of each block; nothing for a dense run."""
    if not len(loads.step_R):
        return ""
    blocks = range(loads.expert_RME.shape[1])
    marked = " Lines: experts changed ranks." if loads.moves else ""
    return (
        "<p>Routed pairs that each expert received, relative to an even share. Across: step; up: expert."
        f"{marked}</p>\n"
        '<p class="legend"><span>0, idle</span>'
        f'<span class="bar" style="background: {load_gradient()}"></span><span>{LOAD_LIMIT:g} × even or more</span>'
        "<span>(no colour: even)</span></p>\n"
        + plots(((f"MoE block {block}", experts_svg(loads, block)) for block in blocks), "panels")
    )
