"""How well does a small model learn with each optimizer? python profiling/optimizers.py [STEPS]

Trains a small form of `configs/shakespeare_cpu.yaml` (two blocks, 512 bytes in a step) with each optimizer and three
learning rates. All runs process the same tokens in the same order, with the same seed and otherwise default settings.
"""

from count_argument import count_argument
from results_file import rounded, write_result
from training_run import records_of

from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.errors import run_command

SMALL = ["model.num_layers=2", "data.seq_len=64", "train.batch_size=8", "optimizer.warmup_steps=20"]
RATES = (1e-3, 3e-3, 1e-2)
OWN_RATES = {"lion": (1e-4, 3e-4, 1e-3)}  # an update of signs is longer than one of AdamW


def main() -> None:
    """Train with all optimizers and write results/optimizers.json."""
    steps = count_argument("STEPS", 200, __doc__)
    losses = {
        name: {f"{rate:g}": _validation_loss(name, rate, steps) for rate in OWN_RATES.get(name, RATES)}
        for name in OPTIMIZER_FACTS
    }
    write_result("optimizers", {"steps": steps, "settings": SMALL, "validation_loss": losses})


def _validation_loss(name: str, rate: float, steps: int) -> float:
    settings = [f"optimizer.name={name}", f"optimizer.learning_rate={rate}", f"train.eval_every={steps}"]
    records = records_of([*SMALL, *settings], steps)
    (validation,) = (record["validation_loss"] for record in records if "validation_loss" in record)
    return rounded(validation)


if __name__ == "__main__":
    run_command(main)
