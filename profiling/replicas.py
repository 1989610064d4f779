"""What do replicas do to the load of ranks if one expert is too much for any rank? python profiling/replicas.py [STEPS]

Trains the model of `migration.py` with a router that sends every token to the first of 64 experts and to another one:
four times the average load of a rank. Compares training without migration, with migration alone, and with a slot for a
replica on each rank, at the same batches, seed and optimizer. Compares the loads, and the bytes of the compiled sums of
copies with the predicted ones. Losses are compared by `tests/step/test_replicas.py`: this router draws by the bits of
its logits, so it draws differently if copies are added up in another order. Takes about 8 minutes.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from count_argument import count_argument
from migration import ON, RANKS, SETTINGS
from results_file import rounded, write_result
from training_run import records_of, train_config

from moe_jax.config import Config
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.rebalance.transfer import Mover
from moe_jax.step.compile import batch_shape, step_program, target_here
from moe_jax.step.trainer import make_trainer

ROUTER = "model.moe.gate=skewed_gate:choose_one_always"
RUNS: dict[str, list[str]] = {"off": [], "migration": ON, "replicas": [*ON, "migration.replicas=1"]}


def main() -> None:
    """Train all three runs and write results/replicas.json."""
    steps = count_argument("STEPS", 250, __doc__)
    initialize(Processes(mode="off"), RANKS)
    settings = [*SETTINGS, ROUTER, f"train.eval_every={steps}"]
    records = {name: records_of([*settings, *more], steps) for name, more in RUNS.items()}
    config = train_config([*settings, *RUNS["replicas"]], steps)
    values: dict[str, Any] = {
        "settings": settings,
        "runs": RUNS,
        "rank_load_max_over_mean": {name: _loads(records[name]) for name in RUNS if name != "off"},
        "moves": {name: _moves(records[name]) for name in RUNS if name != "off"},
        "losses_of_migration_equal_off_bit_for_bit": _curve(records["migration"]) == _curve(records["off"]),
        "validation_loss": {name: rounded(records[name][-1]["validation_loss"]) for name in RUNS},
        **_bytes(config),
    }
    write_result("replicas", values)


def _loads(records: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    return {record["step"]: [rounded(x) for x in record["rank_load"]] for record in records if "rank_load" in record}


def _moves(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    moves = (record for record in records if "migrated_blocks" in record or "refused_blocks" in record)
    return [{name: value for name, value in record.items() if name != "tokens"} for record in moves]


def _curve(records: Sequence[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def _bytes(config: Config) -> dict[str, Any]:
    """Return bytes of the sum of one expert's gradients in the compiled step, and of its copy in the compiled move."""
    mesh = make_mesh(config.mesh)
    trainer = make_trainer(config, mesh)
    step = step_program(trainer, batch_shape(config, mesh), target_here(trainer)).compile().as_text() or ""
    mover = Mover(config, trainer)
    (group,) = mover.groups
    gradient_bytes = mover.expert_bytes(group) // 3  # a move sends weights and both moments
    sums = re.findall(r"= f32\[([\d,]+)\]\S* all-reduce(?:-start)?\([^\n]*all_reduce_replicated_experts", step)
    return {
        "bytes_of_compiled_sums_of_copies": [4 * math.prod(map(int, shape.split(","))) for shape in sums],
        "gradient_bytes_of_an_expert": gradient_bytes,
        "bytes_of_a_copy": mover.expert_bytes(group),
    }


if __name__ == "__main__":
    run_command(main)
