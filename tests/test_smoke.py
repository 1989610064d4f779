"""What a user types: the real command with the config that the README trains, cut to two blocks, and its defaults.

Runs of one mesh compute the same function, whatever their schedule and exchange: their losses are compared with
those of the plain step there. All have eight devices, so that they share what they compile besides their step.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_jax.telemetry.run_log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
SMALLER = "mesh.cpu_devices=8 model.num_layers=2 data.seq_len=64"
RUNS = {
    "data and expert ranks": (
        "mesh.data=2 mesh.expert=4 train.batch_size=32",
        [
            "schedule.policy=unified schedule.microbatches=4 exchange.algorithm=hier_2d exchange.ranks_per_node=2 "
            "exchange.reduction=ring",
            "schedule.policy=expert_pipeline schedule.microbatches=2 exchange.algorithm=halo exchange.ranks_per_node=2 "
            "schedule.weight_grad=greedy schedule.grad_reduce=bucketed schedule.bucket_cap_mb=1",
        ],
    ),
    "context and expert ranks, a batch in parts": (
        "mesh.data=2 mesh.context=2 mesh.expert=2 train.grad_accumulation=2",
        ["schedule.policy=unified schedule.microbatches=2 exchange.algorithm=ring"],
    ),
    "pipeline stages": (
        "mesh.data=2 mesh.pipeline=2 mesh.expert=2 train.batch_size=32 train.grad_accumulation=4",
        ["schedule.pipeline=zero_bubble schedule.policy=unified schedule.microbatches=2"],
    ),
}


def losses_of(settings: str, folder: Path) -> np.ndarray:
    """The loss of each step, from a process of its own, with an environment of its own but for the programs."""
    ours = ("XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    given = f"train.steps={STEPS} optimizer.warmup_steps=2 log.every=1 log.dir={folder} train.eval_batches=1"
    given = f"{given} {SMALLER} {settings}"
    command = [sys.executable, "-m", "moe_jax.train", "--config", "configs/shakespeare_cpu.yaml", *given.split()]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{settings}: exit code {ended.returncode}, {ended.stderr[-2000:]}"
    return np.array([record["loss"] for record in read_metrics(folder) if "loss" in record])


@pytest.mark.parametrize("name", RUNS)
def test_schedules_train_alike_from_the_command_line(name, tmp_path):
    mesh, schedules = RUNS[name]
    plain = losses_of(mesh, tmp_path / "plain")
    assert len(plain) == STEPS
    for number, schedule in enumerate(schedules):
        losses = losses_of(f"{mesh} {schedule} log.sample_tokens=0", tmp_path / str(number))
        np.testing.assert_allclose(losses, plain, rtol=1e-4, err_msg=f"{mesh} {schedule}")
