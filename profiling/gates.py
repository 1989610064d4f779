"""How well does a small model learn with each gate? python profiling/gates.py [--steps STEPS] [GATE …]

Trains a small form of `configs/shakespeare_cpu.yaml` (two blocks, 512 bytes in a step) once with each gate, without
those that are for measuring speed only. All runs process the same tokens in the same order, with the same seed and
optimizer. With names of gates, only these are trained, and the results of the others stay, with their provenance.
Losses of gates whose choice for a token depends on later tokens (`expert_choice`, `softmoe`, `batch_prioritised`) could
not be reached in sampling.
"""

from typing import Any

from count_argument import check_least
from results_file import rounded, with_earlier, write_result
from training_run import records_of, train_config

from moe_jax.config.registry import GATE_FACTS
from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.resources import count_parameters

SMALL = ["model.num_layers=2", "data.seq_len=64", "train.batch_size=8", "optimizer.warmup_steps=20"]
OWN = {
    "deepseek_v2": ["model.moe.n_group=4", "model.moe.topk_group=2", "model.moe.norm_topk_prob=false"],
    "deepseek_v3": ["model.moe.n_group=4", "model.moe.topk_group=2"],
    "softmoe": ["model.moe.slots_per_expert=160"],  # equal to the capacity of the other gates
    "expert_choice": [],
}
_LAST = 20  # steps that the loads at the end are averaged over


def main() -> None:
    """Train with all gates and write results/gates.json."""
    parser = CommandParser(prog="python profiling/gates.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("gates", metavar="GATE", nargs="*")
    arguments = parser.parse_args()
    check_least(arguments, steps=1)
    learning = [gate for gate, facts in GATE_FACTS.items() if not facts.for_timing_only]
    found = {gate: _run(gate, arguments.steps) for gate in arguments.gates or learning}
    about: dict[str, Any] = {"steps": arguments.steps, "settings": SMALL}
    values = with_earlier("gates", "gates", found, about) if arguments.gates else about | {"gates": found}
    write_result("gates", values | {"gates": {gate: values["gates"][gate] for gate in learning}})


def _run(gate: str, steps: int) -> dict[str, object]:
    settings = [*SMALL, f"model.moe.gate={gate}", "log.every=1", f"train.eval_every={steps}", *OWN.get(gate, [])]
    records = records_of(settings, steps)
    loads = [record["load_max_over_mean"] for record in records if "load_max_over_mean" in record]
    dropped = [record["dropped_fraction"] for record in records if "dropped_fraction" in record]
    (validation,) = (record["validation_loss"] for record in records if "validation_loss" in record)
    last = [record["cross_entropy"] for record in records if "cross_entropy" in record][-_LAST:]
    return {
        "settings": OWN.get(gate, []),
        "validation_loss": rounded(validation),
        "training_loss": rounded(sum(last) / len(last)),
        "load_max_over_mean": rounded(sum(loads[-_LAST:]) / len(loads[-_LAST:])),
        "dropped_fraction": rounded(sum(dropped[-_LAST:]) / len(dropped[-_LAST:])),
        "parameters": count_parameters(train_config(settings, steps).model).total,
    }


if __name__ == "__main__":
    run_command(main)
