"""Runs that end early: numbers that are not finite, and folders that vanish or have no room."""

import dataclasses
import itertools
import json
import re
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moe_jax.checkpoint.save import Checkpoints
from moe_jax.config import Config
from moe_jax.errors import run_command
from moe_jax.run import loop
from moe_jax.run.restore import Restored, restore_latest
from moe_jax.run.setup import Run
from tests.bad_input.cases import COMMANDS, Command, remove


def test_a_run_that_diverges_ends_before_what_came_of_it_is_saved(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove("checkpoints/4")(run)
    compile_first = loop.compile_programs

    def diverging(run: Run) -> Any:
        programs, count = compile_first(run), itertools.count(3)
        compiled_step, diverging_step = programs.step.result(), Future[Any]()

        def step(state: Any, batch: Any) -> Any:
            state, metrics = compiled_step(state, batch)
            bad = {"loss": jnp.float32("nan"), "bad_step": jnp.int32(1)}
            return state, metrics | (bad if next(count) >= 4 else {})

        diverging_step.set_result(step)
        return dataclasses.replace(programs, step=diverging_step)

    monkeypatch.setattr(loop, "compile_programs", diverging)
    assert command("train --config tiny.yaml train.bad_in_a_row=1") == (
        3,
        "error: step 4 has loss=nan, the last of train.bad_in_a_row=1 bad ones in a row, and going back to the "
        "checkpoint of step 2 has not helped: computed again, all of its numbers are finite (more in "
        "run/bad_step.json); use an optimizer.learning_rate below 0.001, or more optimizer.warmup_steps\n",
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]


def test_a_run_whose_checkpoint_is_not_finite_blames_it(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove("checkpoints/4")(run)

    def damaged(config: Config, run: Run) -> tuple[Run, Restored | None]:
        run, found = restore_latest(config, run)
        assert found is not None
        not_finite = jax.tree.map(lambda leaf: leaf * jnp.nan, found.state["params"])
        return run, found._replace(state=found.state | {"params": not_finite})

    monkeypatch.setattr(loop, "restore_latest", damaged)
    assert command("train --config tiny.yaml train.bad_in_a_row=1") == (
        3,
        "error: step 3 has loss=nan, grad_norm=nan, as the parameters of the checkpoint of step 2 in log.dir=run are "
        "not finite: delete it to continue from the one before\n",
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]


def test_a_run_whose_folder_is_deleted_meanwhile_reports_it_and_can_be_resumed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that it has is put back at the next save."""
    remove("checkpoints/4")(run)
    save = Checkpoints.save

    def save_after_a_deletion(self: Checkpoints, step: int, *args: Any, **named: Any) -> None:
        save(self, step, *args, **named)
        if step == 4:
            self.newest()
            shutil.rmtree(run)

    monkeypatch.setattr(Checkpoints, "save", save_after_a_deletion)
    for line in ("train --config tiny.yaml train.steps=6", "train --config tiny.yaml train.steps=8 checkpoint.every=0"):
        monkeypatch.setattr(sys, "argv", line.split())
        run_command(COMMANDS["train"])
    output = capfd.readouterr().out
    for name in (
        "metrics.jsonl was deleted",
        "config.yaml was deleted",
        "checkpoints of steps 2, 4 in run/checkpoints",
    ):
        assert name in output
    assert output.count("resuming from step 6\n") == 1
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 6, 8]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "8"]
    assert (run / "config.yaml").exists()
    assert (run / "provenance.json").exists()


def test_a_new_run_asks_for_room_for_a_checkpoint_before_it_trains(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    code, reported = command("train --config tiny.yaml log.dir=new")
    assert code == 2
    assert re.fullmatch(
        r"error: log\.dir=new has no room for a checkpoint \(it takes .* kB and leaves 1\.0 MB free, and there are "
        r"5\.0 kB left\): free some space, or use another one\n",
        reported,
    )
    assert not list((folder / "new").rglob("*"))


@pytest.mark.parametrize("full_at", [4, 6])
def test_a_checkpoint_that_finds_no_room_ends_the_run_only_if_it_is_the_last(
    full_at: int, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    remove("checkpoints/4")(run)
    save = Checkpoints.save

    def save_on_a_full_disk(self: Checkpoints, step: int, *args: Any, **named: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if step == full_at:
                patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
            save(self, step, *args, **named)

    monkeypatch.setattr(Checkpoints, "save", save_on_a_full_disk)
    monkeypatch.setattr(sys, "argv", ["train", "--config", "tiny.yaml", "train.steps=6"])
    reason = r"was not saved \(it takes .* kB and leaves 1\.0 MB free, and there are 5\.0 kB left\)"
    if full_at == 6:
        with pytest.raises(SystemExit) as ending:
            run_command(COMMANDS["train"])
        assert ending.value.code == 2
        reported = (
            rf"error: log\.dir=run: its last checkpoint, of step 6, {reason}: free some space, or .* resumes from "
            r"step 4\n"
        )
        assert re.fullmatch(reported, capfd.readouterr().err)
    else:
        run_command(COMMANDS["train"])
        assert capfd.readouterr().err == ""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (alarm,) = (record for record in records if "alarm" in record)
    newest = full_at - 2
    assert alarm["step"] == full_at
    assert alarm["failed_saves"] == 1
    assert re.fullmatch(
        rf"the checkpoint of step {full_at} {reason}, the newest is of step {newest}: free some space", alarm["alarm"]
    )
    saved = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert saved == sorted({2, 4, 6} - {full_at})
