"""Does a run with sharded parameters have the losses of one without? python profiling/sharded_losses.py [STEPS]

Trains a small form of `configs/shakespeare_cpu.yaml` by scheduled steps, on each mesh of the covering array of training
steps (`tests/step/step_settings.py`) with twice its data ranks, so on eight simulated devices: once with sharded
parameters (`optimizer.zero=3`), and once with nothing sharded (0). Tokens, seed and optimizer are the same. Takes some
minutes. Writes results/sharded_losses.json.
"""

import sys
from pathlib import Path
from typing import Any

from count_argument import count_argument
from results_file import rounded, write_result
from training_run import losses_of, tiny

from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.step.step_settings import FACTORS

DEVICES = 8
SETTINGS = [
    *tiny(DEVICES, batch_size=16, seq_len=16, experts=8),
    *("model.num_layers=4", "model.hidden_size=32", "model.intermediate_size=48", "model.moe.intermediate_size=24"),
    *("optimizer.warmup_steps=0", "schedule.policy=unified", "schedule.microbatches=2", "schedule.weight_grad=greedy"),
    *("schedule.grad_reduce=bucketed",),
]


def with_eight_devices(mesh: str) -> list[str]:
    """Return the settings of a mesh of four devices with twice as many data ranks."""
    settings = dict(each.split("=") for each in mesh.split())
    return [f"{name}={value}" for name, value in (settings | {"mesh.data": 2 * int(settings["mesh.data"])}).items()]


def compared(mesh: list[str], steps: int) -> dict[str, Any]:
    """Train on a mesh with sharded and with whole parameters, and compare the losses of all steps."""
    whole, sharded = (
        list(losses_of([*SETTINGS, *mesh, f"optimizer.zero={stage}"], steps, "loss").values()) for stage in (0, 3)
    )
    differences = [abs(a / b - 1) for a, b in zip(sharded, whole, strict=True)]
    return {
        "settings": " ".join(mesh),
        "steps": len(whole),
        "equal_bit_for_bit": sharded == whole,
        "largest_relative_difference": rounded(max(differences)),
        "first_and_last_loss": [whole[0], whole[-1]],
    }


def main() -> None:
    """Train on all meshes and write the results."""
    steps = count_argument("STEPS", 20, __doc__)
    initialize(Processes(mode="off"), DEVICES)
    found = {name: compared(with_eight_devices(mesh), steps) for name, mesh in FACTORS["mesh"].items()}
    values = {
        "steps": steps,
        "settings": SETTINGS,
        "meshes": found,
        "equal_bit_for_bit": sum(each["equal_bit_for_bit"] for each in found.values()),
        "largest_relative_difference": max(each["largest_relative_difference"] for each in found.values()),
    }
    write_result("sharded_losses", values)


if __name__ == "__main__":
    run_command(main)
