"""Does a model learn as well if its rows are sent in fewer bits? python profiling/compressed_rows.py [STEPS]

Trains the model of `configs/shakespeare_cpu.yaml` on four expert ranks, simulated on the CPU, with each form of
compression (`model.moe.hooks`). All runs process the same tokens in the same order, with the same seed and optimizer.
One more run without compression and with another seed shows the effect of chance alone.
"""

from count_argument import count_argument
from loss_curves import compare_losses

from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command

RANKS = 4
RUNS = {
    "none": [],
    "bf16": ["model.moe.hooks=bf16"],
    "fp8": ["model.moe.hooks=fp8"],
    "none, another seed": ["train.seed=1"],
}


def main() -> None:
    """Train all runs and write results/compressed_rows.json and .png."""
    steps = count_argument("STEPS", 600, __doc__)
    initialize(Processes(mode="off"), cpu_devices=RANKS)
    where = ["mesh.data=1", f"mesh.expert={RANKS}"]
    runs = {name: [*settings, *where] for name, settings in RUNS.items()}
    compare_losses("compressed_rows", runs, steps, {"expert_ranks": RANKS})


if __name__ == "__main__":
    run_command(main)
