"""A killed run resumes bit for bit, on another mesh to round-off, and a signal saves it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from moe_jax.checkpoint.files import newest_checkpoint
from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.run import loop
from moe_jax.run.loop import train
from moe_jax.run.restore import Restored, restore_latest
from moe_jax.run.setup import Programs, Run
from tests.run.whole_runs import compiled_once

# The learning rate depends on the step to far beyond the checkpoint, but not on train.steps; and there is no capacity,
# which would depend on the number of devices that a batch is cut over.
SMALL = {
    "model": {
        "hidden_size": 16,
        "num_layers": 2,
        "intermediate_size": 24,
        "moe": {"num_experts": 8, "intermediate_size": 12, "moe_layer_freq": 2, "capacity_factor": None},
    },
    "mesh": {"cpu_devices": 8, "data": 1, "expert": 8},
    "exchange": {"rank_capacity_factor": None},
    "data": {"seq_len": 16},
    "optimizer": {"schedule": "constant", "warmup_steps": 80},
    "train": {"steps": 100, "batch_size": 8, "compute_dtype": "float32", "eval_every": 50, "eval_batches": 2},
    "checkpoint": {"every": 50},
    "log": {"every": 1, "tensorboard": False, "sample_tokens": 0},
}


def config_in(folder: Path, *overrides: str) -> Config:
    path = folder / "experiment.yaml"
    path.write_text(json.dumps(SMALL))
    return load_config(path, [f"log.dir={folder}", *overrides])


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> Iterator[None]:
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder and last state of a run of 100 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, train(config_in(folder))


@pytest.fixture
def restored(monkeypatch) -> list[int]:
    """The steps of the checkpoints restored in this test."""
    steps: list[int] = []

    def spy(config: Config, run: Run) -> tuple[Run, Restored | None]:
        run, found = restore_latest(config, run)
        steps.extend([int(found.state["step"])] if found else [])
        return run, found

    monkeypatch.setattr(loop, "restore_latest", spy)
    return steps


@contextmanager
def started(folder: Path, *command: str) -> Iterator[subprocess.Popen]:
    """A process that trains there; killed at the end of the context if it still runs."""
    config_in(folder)
    module = command or ("moe_jax.train",)
    line = [sys.executable, "-m", *module, "--config", folder / "experiment.yaml", f"log.dir={folder}"]
    with (folder / "output").open("w") as output, subprocess.Popen(line, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(reached: Callable[[], bool], folder: Path, process: subprocess.Popen, at_most_s: float = 300) -> None:
    deadline = time.monotonic() + at_most_s
    while not reached():
        assert process.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.02)


def lines_of(folder: Path, last: int) -> list[str]:
    """The records of the steps up to `last`, as they stand in the file."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= last]


def losses_of(folder: Path, last: int = 10**9) -> dict[int, float]:
    records = [json.loads(line) for line in lines_of(folder, last)]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_killed_and_resumed_run_is_bit_identical(uninterrupted, restored, tmp_path, capsys):
    """The records up to the checkpoint hold times of the clock: only the first process can have written them."""
    folder, expected = uninterrupted
    with started(tmp_path) as process:
        wait_until(lambda: newest_checkpoint(tmp_path) == 50, tmp_path, process)
    assert newest_checkpoint(tmp_path) == 50, "killed too late to prove anything"
    before = lines_of(tmp_path, last=50)
    assert len(before) == 50 + 1, "the steps and a validation"
    state = train(config_in(tmp_path))
    assert restored == [50]
    assert "resuming from step 50\n" in capsys.readouterr().out
    assert lines_of(tmp_path, last=50) == before
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected))
    assert losses_of(tmp_path) == losses_of(folder), "each step recorded once, with the same loss"
    assert len(lines_of(tmp_path, last=100)) == len(lines_of(folder, last=100)) == 100 + 2


def assert_equal_to_round_off(folder: Path, expected: Path) -> None:
    losses, wanted = losses_of(folder), losses_of(expected)
    assert losses.keys() == wanted.keys()
    # measured over the 50 steps after the restore: 1.3e-7
    np.testing.assert_allclose(list(losses.values()), list(wanted.values()), rtol=1e-6)


def test_resumed_on_another_mesh_losses_are_equal_to_round_off(uninterrupted, restored, tmp_path, capsys):
    folder, _ = uninterrupted
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "100")
    before = lines_of(tmp_path, last=50)
    train(config_in(tmp_path, "mesh.data=2", "mesh.expert=4"))
    assert restored == [50]
    assert "changed since: mesh.data=2 (was " in capsys.readouterr().out
    assert lines_of(tmp_path, last=50) == before
    assert_equal_to_round_off(tmp_path, folder)


def test_heads_and_hidden_widths_are_cut_and_joined_again_between_two_starts(uninterrupted, restored, tmp_path):
    cut = ["mesh.expert=2", "mesh.tensor=4", "optimizer.zero=1"]
    train(config_in(tmp_path, "train.steps=50", *cut))
    train(config_in(tmp_path, "train.steps=75"))
    train(config_in(tmp_path, *cut))
    assert restored == [50, 75]
    assert_equal_to_round_off(tmp_path, uninterrupted[0])


def test_a_traced_step_counts_for_no_time_and_changes_nothing(uninterrupted, tmp_path):
    train(config_in(tmp_path, "train.steps=5", "log.trace_step=3"))
    assert losses_of(tmp_path) == losses_of(uninterrupted[0], last=5)
    records = [json.loads(line) for line in lines_of(tmp_path, last=5)]
    assert [record["step"] for record in records if "loss" in record and "step_s" not in record] == [3]
    assert (tmp_path / "trace" / "0" / "step.hlo").read_text().startswith("HloModule")


def test_a_signal_saves_and_exits_0(tmp_path):
    """As SIGTERM does, which `test_many_processes.py` sends."""
    with started(tmp_path) as process:
        wait_until(lambda: len(losses_of(tmp_path)) >= 5, tmp_path, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, (tmp_path / "output").read_text()
    saved = newest_checkpoint(tmp_path)
    assert saved == max(losses_of(tmp_path)) < 100
    printed = (tmp_path / "output").read_text()
    assert printed.endswith(f"stopped after step {saved}: the same command resumes from there\n")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_saves_nothing(number, tmp_path, monkeypatch, capsys):
    """Compiling takes minutes for a large model: a signal must not have to wait for it, nor be lost."""

    def unhandled(*_: object) -> None:
        pytest.fail("the run does not handle signals yet")

    before = signal.signal(number, unhandled)
    compile_first = loop.compile_programs

    def signalled(run: Run) -> Programs:
        os.kill(os.getpid(), number)
        return compile_first(run)

    monkeypatch.setattr(loop, "compile_programs", signalled)
    try:
        train(config_in(tmp_path))
        assert signal.getsignal(number) is unhandled, "the caller's handler is put back"
    finally:
        signal.signal(number, before)
    assert losses_of(tmp_path) == {}
    assert newest_checkpoint(tmp_path) is None
    assert "stopped after step 0" in capsys.readouterr().out
