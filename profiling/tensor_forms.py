"""Do all forms of exchange over tensor ranks train to the same losses? python profiling/tensor_forms.py [STEPS]

Trains the model of `configs/shakespeare_cpu.yaml` on two expert ranks of two and of four tensor ranks, simulated on the
CPU, with each form (`exchange.tensor_form`); tokens, seed and optimizer are the same. Losses have to be equal bit for
bit. Also counts, in the compiled training step, the bytes that leave a device in all-to-alls. Writes
results/tensor_forms.json and .png; exit code 1 if losses differ.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from count_argument import count_argument
from results_file import write_result
from training_run import losses_of, train_config

from moe_jax.config import Config
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.traffic import bytes_sent
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.tensor_dispatch import FORMS
from moe_jax.step.compile import batch_shape, step_program, target_here
from moe_jax.step.trainer import make_trainer

EXPERT_RANKS, TENSOR_RANKS = 2, (2, 4)
_STYLES = ("k-", "C0--", "C1-.", "C2:")


def settings_of(form: str, tensor: int) -> list[str]:
    """Return settings of a form, with a data axis that fills all devices."""
    mesh = ["mesh.data=-1", f"mesh.expert={EXPERT_RANKS}", f"mesh.tensor={tensor}"]
    return [*mesh, f"exchange.tensor_form={form}", "log.every=1"]


def exchanged_bytes(config: Config) -> float:
    """Return the bytes that leave a device in all-to-alls of a training step."""
    mesh = make_mesh(config.mesh)
    trainer = make_trainer(config, mesh)
    step = step_program(trainer, batch_shape(config, mesh), target_here(trainer)).compile()
    program = parse(step.as_text() or "")
    return bytes_sent(program, "all-to-all", mesh.size)


def main() -> None:
    """Train all runs, compare, write results."""
    steps = count_argument("STEPS", 200, __doc__)
    initialize(Processes(mode="off"), cpu_devices=EXPERT_RANKS * max(TENSOR_RANKS))
    losses: dict[str, dict[str, list[float]]] = {}
    sent: dict[str, dict[str, float]] = {}
    for tensor in TENSOR_RANKS:
        name = f"{tensor} tensor ranks"
        losses[name], sent[name] = {}, {}
        for form in FORMS:
            settings = settings_of(form, tensor)
            sent[name][form] = exchanged_bytes(train_config(settings, steps))
            losses[name][form] = list(losses_of(settings, steps, "loss").values())
    same = {name: all(curve == of["replicated"] for curve in of.values()) for name, of in losses.items()}
    values: dict[str, Any] = {
        "steps": steps,
        "expert_ranks": EXPERT_RANKS,
        "all_to_all_bytes_of_a_device_in_a_step": sent,
        "all_to_all_bytes_over_replicated": {
            name: {form: num_bytes / of["replicated"] for form, num_bytes in of.items()} for name, of in sent.items()
        },
        "losses_are_equal_bit_for_bit": same,
        "first_and_last_loss": {name: [of["replicated"][0], of["replicated"][-1]] for name, of in losses.items()},
    }
    path = write_result("tensor_forms", values)
    _draw(losses, path.with_suffix(".png"))
    if not all(same.values()):
        raise SystemExit(1)


def _draw(losses: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, rows = plt.subplots(1, len(losses), figsize=(9, 3.5), sharey=True, layout="constrained")
    for axes, (name, of_form) in zip(rows, losses.items(), strict=True):
        for (form, curve), style in zip(of_form.items(), _STYLES, strict=True):
            axes.plot(range(1, len(curve) + 1), curve, style, label=form)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    rows[0].set_ylabel("training loss, nats per byte")
    rows[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_command(main)
