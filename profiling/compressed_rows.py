"""Does a model learn as well if its rows travel in fewer bits? python profiling/compressed_rows.py [STEPS]

Trains the model of `configs/shakespeare_cpu.yaml` on four expert ranks, simulated on the CPU, with each form of
compression (`model.moe.hooks`). All see the same tokens in the same order, with the same seed and optimiser; one more
run without compression and with another seed shows how much chance alone does.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from count_argument import count_argument
from results_file import write_result
from training_run import losses_of

from moe_jax.errors import run_command
from moe_jax.train.processes import Processes, initialize

RANKS = 4
RUNS = {
    "none": [],
    "bf16": ["model.moe.hooks=bf16"],
    "fp8": ["model.moe.hooks=fp8"],
    "none, another seed": ["train.seed=1"],
}
_STYLES = dict(zip(RUNS, ("k-", "C0--", "C1-.", "k:"), strict=True))


def main() -> None:
    """Train all and write results/compressed_rows.json and .png."""
    steps = count_argument("STEPS", 600, __doc__)
    initialize(Processes(mode="off"), cpu_devices=RANKS)
    common = ["mesh.data=1", f"mesh.expert={RANKS}", f"train.eval_every={max(steps // 6, 1)}"]
    losses = {name: losses_of([*settings, *common], steps, "validation_loss") for name, settings in RUNS.items()}
    values = {"steps": steps, "expert_ranks": RANKS, "validation_losses": losses}
    path = write_result("compressed_rows", values)
    _draw(losses, path.with_suffix(".png"))


def _draw(losses: dict[str, dict[int, float]], path: Path) -> None:
    """Each run's validation losses above, and below how far they are from the first one's."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(6, 5), sharex=True)
    for name, of_step in losses.items():
        above.plot(of_step.keys(), of_step.values(), _STYLES[name], label=name)
        below.plot(of_step.keys(), [loss - losses["none"][step] for step, loss in of_step.items()], _STYLES[name])
    above.set_ylabel("validation loss, nats per byte")
    below.set_ylabel("difference from none")
    below.set_xlabel("steps")
    above.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_command(main)
