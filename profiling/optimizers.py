"""How well does a small model learn with each optimizer? python profiling/optimizers.py [STEPS]

Trains a small form of `configs/shakespeare_cpu.yaml` (two blocks, 512 bytes in a step) with each optimizer and several
learning rates, larger ones as long as the largest is the best, and with the best one from three seeds. All runs of a
seed process the same tokens in the same order, with otherwise default settings.
"""

import statistics

from count_argument import count_argument
from results_file import rounded, write_result
from training_run import records_of

from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.errors import run_command

SMALL = ["model.num_layers=2", "data.seq_len=64", "train.batch_size=8", "optimizer.warmup_steps=20"]
RATES = (1e-3, 3e-3, 1e-2)
OWN_RATES = {"lion": (1e-4, 3e-4, 1e-3)}  # an update of signs is longer than one of AdamW
SEEDS = (0, 1, 2)


def main() -> None:
    """Train with all optimizers and write results/optimizers.json."""
    steps = count_argument("STEPS", 200, __doc__)
    losses: dict[str, dict[str, float]] = {}
    seeds: dict[str, dict[str, object]] = {}
    for name in OPTIMIZER_FACTS:
        rates = list(OWN_RATES.get(name, RATES))
        found = {rate: _validation_loss(name, rate, steps) for rate in rates}
        while (best := min(found, key=found.__getitem__)) == max(found):
            found[3 * best] = _validation_loss(name, 3 * best, steps)
        losses[name] = {f"{rate:g}": loss for rate, loss in found.items()}
        of_seeds = [_validation_loss(name, best, steps, seed) for seed in SEEDS]
        seeds[name] = {"rate": best, "validation_loss": of_seeds, "mean": rounded(statistics.mean(of_seeds))}
    write_result(
        "optimizers", {"steps": steps, "settings": SMALL, "validation_loss": losses, "best_rate_by_seed": seeds}
    )


def _validation_loss(name: str, rate: float, steps: int, seed: int = 0) -> float:
    settings = [f"optimizer.name={name}", f"optimizer.learning_rate={rate}", f"train.eval_every={steps}"]
    records = records_of([*SMALL, *settings, f"train.seed={seed}"], steps)
    (validation,) = (record["validation_loss"] for record in records if "validation_loss" in record)
    return rounded(validation)


if __name__ == "__main__":
    run_command(main)
