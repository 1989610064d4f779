"""Training runs that differ in one setting: their validation losses as a result file and a picture."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from results_file import write_result
from training_run import losses_of


def compare_losses(
    name: str, runs: Mapping[str, Sequence[str]], steps: int, facts: Mapping[str, Any] | None = None
) -> None:
    """Train each of `runs` with its settings and write results/NAME.json and .png; the first run is the baseline.

    `facts` are added to the result file.
    """
    every = f"train.eval_every={max(steps // 6, 1)}"
    losses = {run: losses_of([*settings, every], steps, "validation_loss") for run, settings in runs.items()}
    path = write_result(name, {"steps": steps, **(facts or {}), "validation_losses": losses})
    _draw(losses, path.with_suffix(".png"))


def _draw(losses: dict[str, dict[int, float]], path: Path) -> None:
    """Draw each run's validation losses, and below them their differences from the first run's."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(6, 5), sharex=True)
    first = next(iter(losses))
    for (run, of_step), style in zip(losses.items(), cycle(("k-", "C0--", "C1-.", "k:")), strict=False):
        above.plot(of_step.keys(), of_step.values(), style, label=run)
        below.plot(of_step.keys(), [loss - losses[first][step] for step, loss in of_step.items()], style)
    above.set_ylabel("validation loss, nats per byte")
    below.set_ylabel(f"difference from {first}")
    below.set_xlabel("steps")
    above.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
