"""Which balancing method evens out expert loads, and at what loss? python profiling/balance.py [STEPS]

Trains `configs/shakespeare_cpu.yaml` with gate sigmoid in three settings: the load-balance loss at its default weight,
score biases instead (`model.moe.bias_update_rate`), both with two seeds, and neither. Runs with the same seed process
the same tokens in the same order. Loads are means over the last tenth of the steps.
"""

import numpy as np
from count_argument import count_argument
from results_file import rounded, write_result
from training_run import records_of

from moe_jax.errors import run_command

ALL = ["model.moe.gate=sigmoid", "log.every=1"]
NO_LOSS = "model.moe.aux_loss_coeff=0"
RUNS: dict[str, tuple[list[str], tuple[int, ...]]] = {  # run name: its settings and its seeds
    "load-balance loss": ([], (0, 1)),
    "bias, rate 0.01": (["model.moe.bias_update_rate=0.01", NO_LOSS], (0, 1)),
    "neither": ([NO_LOSS], (0,)),
}


def main() -> None:
    """Train all runs, print a row for each and write results/balance.json."""
    steps = count_argument("STEPS", 1000, __doc__)
    runs: dict[str, dict[str, object]] = {}
    for name, (settings, seeds) in RUNS.items():
        runs[name] = {"settings": settings}
        for seed in seeds:
            runs[name][f"seed {seed}"] = row = _run([*settings, f"train.seed={seed}"], steps)
            print(f"{name}, seed {seed}: {row}", flush=True)
    write_result("balance", {"steps": steps, "settings": ALL, "runs": runs})


def _run(settings: list[str], steps: int) -> dict[str, object]:
    records = records_of([*ALL, *settings, f"train.eval_every={steps}"], steps)
    trained = [record for record in records if "expert_load" in record]
    (validation,) = (record["validation_loss"] for record in records if "validation_loss" in record)
    last = trained[-max(steps // 10, 1) :]
    share_SME = np.array([record["expert_load"] for record in last])
    experts = share_SME.shape[-1]
    of_window_M = share_SME.mean(axis=0).max(axis=-1) * experts
    of_step_SM = share_SME.max(axis=-1) * experts
    return {
        "validation_loss": rounded(validation),
        "training_loss": rounded(_mean(last, "cross_entropy")),
        "load_max_over_mean_of_each_block": [rounded(float(x)) for x in of_window_M],
        "load_max_over_mean": rounded(float(of_window_M.max())),
        "load_max_over_mean_of_a_step_of_each_block": [rounded(float(x)) for x in of_step_SM.mean(axis=0)],
        "load_min_over_mean": rounded(float(share_SME.mean(axis=0).min() * experts)),
        "dropped_fraction": rounded(_mean(last, "dropped_fraction")),
        "dropped_fraction_of_all_steps": rounded(_mean(trained, "dropped_fraction")),
    }


def _mean(records: list[dict[str, float]], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


if __name__ == "__main__":
    run_command(main)
