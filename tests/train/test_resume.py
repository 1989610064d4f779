"""A killed run goes on bit for bit, on another mesh to round-off, and a signal saves it."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from moe_jax.config_files import load_config
from moe_jax.train.loop import train

SMALL = {
    "model": {
        "d_model": 16,
        "num_layers": 2,
        "hidden_dim": 24,
        "moe": {"num_experts": 8, "hidden_dim": 12, "every": 2},
    },
    "mesh": {"cpu_devices": 8, "data": 1, "expert": 8},
    "data": {"seq_len": 16},
    "optimizer": {"warmup_steps": 10},
    "train": {"steps": 100, "batch_size": 8, "compute_dtype": "float32", "eval_every": 50, "eval_batches": 2},
    "checkpoint": {"every": 50},
    "log": {"every": 1, "tensorboard": False, "sample_tokens": 0},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder and last state of a run of 100 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, train(config_in(folder))


def config_in(folder: Path, *overrides: str):
    path = folder / "experiment.yaml"
    path.write_text(json.dumps(SMALL))
    return load_config(path, [f"log.dir={folder}", *overrides])


@contextmanager
def started(folder: Path):
    """A process that trains there; killed at the end of the context if it still runs."""
    config_in(folder)
    command = [sys.executable, "-m", "moe_jax.train", "--config", folder / "experiment.yaml", f"log.dir={folder}"]
    with (folder / "output").open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        yield process
        process.kill()


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while max(losses_of(folder), default=0) < step:
        assert process.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def losses_of(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_killed_and_resumed_run_is_bit_identical(uninterrupted, tmp_path):
    folder, expected = uninterrupted
    with started(tmp_path) as process:
        wait_for_step(tmp_path, 70, process)
    assert not (tmp_path / "checkpoints" / "100").exists(), "killed too late to prove anything"
    state = train(config_in(tmp_path))
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected))
    assert losses_of(tmp_path) == losses_of(folder), "each step recorded once, with the same loss"


def test_resumed_on_another_mesh_goes_on_to_round_off(uninterrupted, tmp_path):
    """Dropless, so that capacity does not depend on the number of devices that a batch is cut over."""
    for steps, mesh in ((20, ["mesh.data=1", "mesh.expert=8"]), (40, ["mesh.data=2", "mesh.expert=4"])):
        settings = ["model.moe.capacity_factor=null", f"train.steps={steps}", "optimizer.schedule=constant"]
        train(config_in(tmp_path, *settings, *mesh))
    losses = losses_of(tmp_path)
    (tmp_path / "same").mkdir()
    train(config_in(tmp_path / "same", *settings, "mesh.data=1", "mesh.expert=8"))
    expected = losses_of(tmp_path / "same")
    assert losses.keys() == expected.keys()
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-4)


def test_sigterm_saves_and_exits_0(tmp_path):
    with started(tmp_path) as process:
        wait_for_step(tmp_path, 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, (tmp_path / "output").read_text()
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == max(losses_of(tmp_path)) < 100
