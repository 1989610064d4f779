"""Does the MoE learn more per token? python profiling/moe_vs_dense.py [STEPS]

Trains the model of `configs/shakespeare_cpu.yaml` and a dense one with the same number of active parameters per token:
its MLP is as wide as the k experts of a token together, plus a width equivalent to the router's parameters, rounded up.
Both process the same tokens in the same order, with the same seed, optimizer and number of steps.
"""

import math

from count_argument import count_argument
from results_file import write_result
from training_run import losses_of, train_config

from moe_jax.errors import run_command
from moe_jax.plan.resources import count_parameters


def main() -> None:
    """Train both models and write results/moe_vs_dense.json."""
    steps = count_argument("STEPS", 600, __doc__)
    model = train_config([], steps).model
    moe, matrices = model.moe, 3 if model.is_gated else 2
    width = moe.top_k * moe.intermediate_size + math.ceil(moe.num_experts / matrices)
    variants = {
        "moe": [],
        "dense": ["model.moe.num_experts=0", f"model.intermediate_size={width}"],
    }
    values: dict[str, object] = {"steps": steps}
    for name, settings in variants.items():
        config, losses = train_config(settings, steps), losses_of(settings, steps, "validation_loss")
        counts = count_parameters(config.model)
        values[name] = {
            "validation_loss": losses[steps],
            "validation_losses": losses,
            "parameters": counts.total,
            "active_parameters": counts.active,
        }
    values["tokens"] = steps * config.train.batch_size * config.data.seq_len
    write_result("moe_vs_dense", values)


if __name__ == "__main__":
    run_command(main)
