"""Does a model learn as well if its experts multiply in 8 bits? python profiling/fp8_experts.py [STEPS]

Trains the model of `configs/shakespeare_cpu.yaml` with each form of `model.moe.expert_matmuls`. All runs process the
same tokens in the same order, with the same seed and optimizer. One more run in float32 with another seed shows the
effect of chance alone.
"""

from count_argument import count_argument
from loss_curves import compare_losses

from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command

RUNS: dict[str, list[str]] = {
    "float32": [],
    "fp8": ["model.moe.expert_matmuls=fp8"],
    "float32, another seed": ["train.seed=1"],
}


def main() -> None:
    """Train all runs and write results/fp8_experts.json and .png."""
    steps = count_argument("STEPS", 600, __doc__)
    initialize(Processes(mode="off"), cpu_devices=1)
    compare_losses("fp8_experts", RUNS, steps)


if __name__ == "__main__":
    run_command(main)
