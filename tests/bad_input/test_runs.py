"""Runs that cannot be written, resumed or restored: their folders, checkpoints, configs and records."""

import dataclasses
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from moe_jax.errors import CheckpointError, run_command
from moe_jax.train import loop
from moe_jax.train.checkpoint import Checkpoints, _not_restored
from moe_jax.train.setup import Run
from tests.bad_input.cases import COMMANDS, Command, Damage, Refusal, cases, remove, tree, write


@pytest.mark.parametrize(
    ("log_dir", "reason"),
    [
        ("file", "created (file is a file)"),
        ("file/run", "created (file is a file)"),
        ("taken", "written (Is a directory)"),
    ],
)
def test_a_log_dir_that_cannot_be_written_stops_the_run(
    log_dir: str, reason: str, folder: Path, compiled_once: None, assert_refused: Refusal
) -> None:
    (folder / "taken" / "config.yaml").mkdir(parents=True)
    message = f"log.dir={log_dir} cannot be {reason}: name another folder"
    assert_refused(f"train --config tiny.yaml log.dir={log_dir}", message)


RESUMED = [
    (
        "another model",
        "model.num_layers=2",
        "model.num_layers=2, but the checkpoints in log.dir=run have model.num_layers=1: "
        "use model.num_layers=1, or another log.dir",
    ),
    (
        "another router",
        "model.moe.gate=sigmoid",
        "model.moe.gate=sigmoid, but the checkpoints in log.dir=run have model.moe.gate=softmax: "
        "use model.moe.gate=softmax, or another log.dir",
    ),
    (
        "fewer steps than it has",
        "train.steps=3",
        "train.steps=3, but log.dir=run has a checkpoint of step 4 already: "
        "use train.steps=4 or more, or another log.dir",
    ),
    (
        "without leave to resume",
        "checkpoint.resume=false",
        "log.dir=run holds checkpoints up to step 4 and checkpoint.resume=false would overwrite them: "
        "use another log.dir, or checkpoint.resume=true",
    ),
]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("words", "message"), cases(RESUMED))
def test_a_run_is_not_resumed_as_another(words: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(f"train --config tiny.yaml {words}", message)


def cut_index(run: Path) -> None:
    (index,) = (run / "checkpoints/4/state/d").iterdir()
    index.write_bytes(index.read_bytes()[:10])


def lose_newest_files_and_older_step(run: Path) -> None:
    remove("checkpoints/2")(run)
    remove("checkpoints/4/state/d")(run)


# HASH: a name that the storage layer makes up.
DAMAGED = [
    ("no state", remove("checkpoints/4/state"), "4 is damaged (state/_METADATA is missing): … go on from step 2"),
    ("no data position", remove("checkpoints/4/data"), "4 is damaged (data/metadata is missing): … go on from step 2"),
    (
        "no manifest",
        remove("checkpoints/4/state/manifest.ocdbt"),
        "4 is damaged (state/manifest.ocdbt is missing): … go on from step 2",
    ),
    (
        "no values",
        remove("checkpoints/4/state/ocdbt.process_0"),
        "4 is damaged (state/ocdbt.process_0/d/HASH is missing): … go on from step 2",
    ),
    ("an index cut short", cut_index, "4 is damaged (state/d/HASH has 10 of NUMBER bytes): … go on from step 2"),
    (
        "a cut data position",
        write("checkpoints/4/data/metadata", '{"next'),
        "4 is damaged (data/metadata: Unterminated string starting at: line 1 column 2 (char 1)): … go on from step 2",
    ),
    (
        "an empty folder",
        lambda run: (run / "checkpoints/9").mkdir(),
        "9 is damaged (state/_METADATA is missing): … go on from step 4",
    ),
    ("nothing older", lose_newest_files_and_older_step, "4 is damaged (state/d/HASH is missing): … start again"),
]


@pytest.mark.parametrize("line", ["train --config tiny.yaml train.steps=6", "generate --run run"])
@pytest.mark.parametrize(("damage", "message"), cases(DAMAGED))
def test_a_damaged_checkpoint_is_named_with_what_is_wrong(
    line: str, damage: Damage, message: str, run: Path, command: Command
) -> None:
    """Found before anything is restored: in orbax, each of its threads would print a stack of its own."""
    damage(run)
    before = tree(run)
    code, errors = command(line)
    pattern = re.escape(f"error: checkpoint run/checkpoints/{message}\n".replace("…", "delete that folder to"))
    assert code == 2
    assert re.fullmatch(pattern.replace("HASH", "[0-9a-f]{32}").replace("NUMBER", r"\d+"), errors)
    assert tree(run) == before


LOST_CONFIG = [
    (
        "missing",
        remove("config.yaml"),
        "config file run/config.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "empty",
        write("config.yaml", ""),
        "config file run/config.yaml is empty: put the run's own there again, or name another file or folder",
    ),
    (
        "cut short",
        write("config.yaml", "model: {"),
        "run/config.yaml: expected the node content, but found '<stream end>' at line 1, column 9",
    ),
    (
        "of another version",
        write("config.yaml", "train: {step: 1}"),
        "unknown setting train.step: did you mean train.steps?",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), cases(LOST_CONFIG))
def test_a_run_whose_config_is_lost_is_neither_resumed_nor_sampled(
    damage: Damage, reason: str, run: Path, assert_refused: Refusal
) -> None:
    damage(run)
    assert_refused("generate --run run", reason)
    resumed = f"log.dir=run has checkpoints, but not the config of their model ({reason}): use another log.dir"
    assert_refused("train --config tiny.yaml", resumed)


def test_a_file_in_the_place_of_the_checkpoints_is_no_new_run(run: Path, assert_refused: Refusal) -> None:
    remove("checkpoints")(run)
    write("checkpoints", "")(run)
    for line in ("train --config tiny.yaml", "generate --run run"):
        assert_refused(line, "run/checkpoints is not a folder: remove it, or use another log.dir")


def test_damaged_records_stop_a_resume_and_a_report(run: Path, assert_refused: Refusal) -> None:
    records = run / "metrics.jsonl"
    records.write_text("\0\0\0\n" + records.read_text())
    for line in ("report run", "train --config tiny.yaml train.steps=6"):
        assert_refused(line, "run/metrics.jsonl line 1 is not a record of metrics: delete the line")


def test_the_run_of_these_cases_can_be_resumed_and_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the cases above might be refused for a reason of their own."""
    for line in ("train --config tiny.yaml train.steps=6", "report run"):
        name, *arguments = line.split()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        run_command(COMMANDS[name])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 4, 6]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "6"]


@pytest.mark.parametrize(
    ("first_bad", "message"),
    [
        (4, "step 4 has loss=nan: training has diverged, and what came of it is not saved: use an optimizer."),
        (3, "step 3 has loss=nan, right after the checkpoint of step 2 in log.dir=run, which must be damaged: delete"),
    ],
)
def test_a_run_that_diverges_ends_before_what_came_of_it_is_saved(
    first_bad: int, message: str, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove("checkpoints/4")(run)
    compile_first = loop.compile_programs

    def diverging(run: Run) -> Any:
        programs, count = compile_first(run), itertools.count(3)

        def step(state: Any, batch: Any) -> Any:
            state, metrics = programs.step(state, batch)
            return state, metrics | ({"loss": jnp.float32("nan")} if next(count) >= first_bad else {})

        return dataclasses.replace(programs, step=step)

    monkeypatch.setattr(loop, "compile_programs", diverging)
    code, errors = command("train --config tiny.yaml")
    assert code == 2
    assert errors.startswith(f"error: {message}")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]


def test_a_checkpoint_that_finds_no_room_ends_the_run_and_is_not_begun(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove("checkpoints/4")(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    code, errors = command("train --config tiny.yaml")
    assert code == 2
    pattern = r"error: log\.dir=run: its checkpoint of step 4 takes .* kB, and there are 5\.0 kB left: .* from step 2\n"
    assert re.match(pattern, errors)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]


def test_a_disk_that_others_fill_meanwhile_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file: [OS error 28: No space left on device]")

    checkpoints = Checkpoints(run, keep=2)
    monkeypatch.setattr(checkpoints._manager, "close", fail.__get__(checkpoints))
    with pytest.raises(CheckpointError, match=r"^log\.dir=run: its last checkpoint found no room"), checkpoints:
        pass
    with pytest.raises(CheckpointError, match=r"^something else"), checkpoints:
        raise CheckpointError("something else")


def test_numbers_that_cannot_be_read_are_told_in_words() -> None:
    """orbax quotes a C++ method of TensorStore's."""
    said = ValueError("Encountered error … See full TensorStore details: <bound method pybind11_detail_function_record")
    assert str(_not_restored(Path("run"), 4, said)).startswith(
        "checkpoint run/checkpoints/4 cannot be restored (some of its numbers cannot be read: files are damaged): move"
    )
