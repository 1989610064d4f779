"""Picture of a disturbed run: its losses and an undisturbed run's, steps lost, and seconds to the first new step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

_COLORS = {
    **{"kill": "#c0392b", "stop": "#2a6fd0", "term": "#3a8f4d", "bit": "#8e44ad", "cut": "#d35400"},
    **{"nan": "#16a2a2", "full": "#7f6a3a", "slow": "#8a8a8a"},
    **{"poke": "#c9a400", "second": "#1b3a5c"},
}


def write_picture(result: Mapping[str, Any], path: Path) -> Path:
    """Draw three plots over the same steps."""
    figure, (losses, lost, seconds) = plt.subplots(
        3, 1, figsize=(10, 7), sharex=True, layout="constrained", height_ratios=[3, 2, 2]
    )
    steps = range(1, len(result["loss"]) + 1)
    losses.plot(steps, result["loss"], color="#333333", linewidth=0.8)
    for kind, color in _COLORS.items():
        faults = [fault for fault in result["faults"] if fault["kind"] == kind]
        label = f"{kind} ({len(faults)})"
        for fault in faults:
            if "step" in fault:
                losses.axvline(fault["step"], color=color, linewidth=0.8, alpha=0.7, label=label)
                label = "_"
        _stems(lost, faults, "steps_lost", color)
        _stems(seconds, faults, "first_new_step_s", color)
    equal = "equal" if result["losses_equal_bit_for_bit"] else "NOT equal"
    losses.set(ylabel="loss")
    title = f"a run through {len(result['faults'])} faults; losses {equal} to an undisturbed run's"
    losses.set_title(title, loc="right")
    losses.legend(frameon=False, ncols=len(_COLORS), fontsize="small", loc="lower left", bbox_to_anchor=(0, 1.08))
    lost.axhline(result["checkpoint_every"], color="#333333", linestyle=":", linewidth=1)
    lost.set(ylabel="steps lost")
    seconds.set(ylabel="seconds to the\nfirst new step", xlabel="step")
    for axes in (losses, lost, seconds):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _stems(axes: Any, faults: list[Mapping[str, Any]], name: str, color: str) -> None:
    shown = [(fault["step"], fault[name]) for fault in faults if "step" in fault and name in fault]
    for step, value in shown:
        axes.vlines(step, 0, value, color=color, linewidth=1)
    axes.plot([step for step, _ in shown], [value for _, value in shown], "o", color=color, markersize=4)
