"""Safety copies: a run resumes from them at the step that it had reached, or says why from its checkpoint."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from moe_jax.checkpoint.replicas import files as safety_files
from moe_jax.checkpoint.replicas.files import whole_slots
from moe_jax.checkpoint.save import Checkpoints
from moe_jax.config import Config
from moe_jax.errors import ConfigError, DivergedError
from moe_jax.run import loop, step_hooks
from moe_jax.run.loop import train
from tests.run.test_resume import SMALL, lines_of, losses_of
from tests.run.whole_runs import compiled_once, config_of

# validations and checkpoints between the copies
TINY = SMALL | {
    "train": SMALL["train"] | {"steps": 12, "eval_every": 5},
    "checkpoint": {"every": 4, "safety_copies_every": 1},
}


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and last state of a run without copies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, train(config_of(folder, TINY, "checkpoint.safety_copies_every=0"))


class Crash(Exception):
    pass


@pytest.fixture
def start(tmp_path, capsys):
    """`run` in a folder, the test's own if none is named; what it printed."""

    def go(*arguments, folder: Path = tmp_path) -> str:
        run(folder, *arguments)
        return capsys.readouterr().out

    return go


def run(folder: Path, crash_in: tuple[str, int] | None, *overrides: str) -> None:
    """Start the run, or resume it, and crash in a step, before its validation or before its checkpoint."""
    (folder / "memory").mkdir(exist_ok=True)

    def crash(where: str, step: int) -> None:
        if crash_in == (where, step):
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "report_progress", before(loop.report_progress, lambda step: crash("step", step + 1)))
        patch.setattr(
            step_hooks, "_validate", before(step_hooks._validate, lambda *a: crash("validation", int(a[1]["step"])))
        )
        patch.setattr(Checkpoints, "save", before(Checkpoints.save, lambda *a, **_: crash("save", a[1])))
        with nullcontext() if crash_in is None else pytest.raises(Crash):
            train(config_in(folder, *overrides))


def before(function: Callable, first: Callable) -> Callable:
    def both(*arguments, **named):
        first(*arguments, **named)
        return function(*arguments, **named)

    return both


def config_in(folder: Path, *overrides: str) -> Config:
    return config_of(folder, TINY, f"checkpoint.safety_copies_dir={folder}/memory", *overrides)


def without_times(folder: Path) -> list[dict]:
    timed = ("step_s", "tokens_per_s", "mfu")
    records = [json.loads(line) for line in lines_of(folder, last=12)]
    kept = [{name: value for name, value in record.items() if name not in timed} for record in records]
    return [record for record in kept if "safety_s" not in record]


def slots(folder: Path):
    return [slot for node in (folder / "memory").glob("*/node-*") for slot in whole_slots(node)]


def test_a_crashed_run_resumes_at_the_step_that_it_had_reached(undisturbed, start, tmp_path):
    """Each step is done and recorded once, each validation and checkpoint made, though some were cut off."""
    assert "safety copies of step 0 took" in start(("step", 4))
    assert "resuming from step 3: from safety copies\n" in start(("validation", 5))
    assert "resuming from step 5: from safety copies\n" in start(("save", 8))
    assert "resuming from step 8: from safety copies\n" in start(("step", 9))
    assert "resuming from step 8: from the checkpoint, as safety copies are not newer\n" in start(("step", 11))
    assert sorted(slot.record.step for slot in slots(tmp_path)) == [9, 10]
    assert "resuming from step 10: from safety copies\n" in start(None)
    assert without_times(tmp_path) == without_times(undisturbed[0])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["12", "8"]
    assert list((tmp_path / "memory").iterdir()) == [], "a run that has ended leaves no copies"


def damage(slot: safety_files.ReplicaFile) -> None:
    with slot.path.open("r+b") as file:
        file.seek(slot.path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def of_another_mesh(slot: safety_files.ReplicaFile) -> None:
    path = slot.path.with_suffix(".json")
    content = json.loads(path.read_text())
    content["record"] = dataclasses.replace(slot.record, mesh={"data": 2, "expert": 4}).to_json()
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """A folder, for a run that crashed in step 8, and a copy of it."""
    folder = tmp_path_factory.mktemp("crashed") / "run"
    folder.mkdir()
    run(folder, ("step", 8))
    return folder, shutil.copytree(folder, folder.with_name("copy"))


@pytest.mark.parametrize(
    ("case", "reported"),
    [
        ("flipped", "resuming from step 6: from safety copies\n"),
        ("both flipped", "resuming from step 4: from the checkpoint, as safety copies of step 6 are damaged\n"),
        ("unfinished", "resuming from step 6: from safety copies\n"),
        ("of another run", "resuming from step 4: from the checkpoint, as there are no safety copies\n"),
        (
            "another mesh",
            "resuming from step 4: from the checkpoint, as safety copies are of another mesh, or cut otherwise\n",
        ),
        ("removed", "resuming from step 4: from the checkpoint, as there are no safety copies\n"),
        ("not recorded", "resuming from step 6: from safety copies\n"),
    ],
)
def test_what_cannot_be_trusted_is_passed_over(case, reported, undisturbed, start, crashed):
    folder, copy = crashed
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    older, newer = sorted(slots(folder), key=lambda slot: slot.record.step)
    if case in ("flipped", "both flipped"):
        damage(newer)
    if case == "both flipped":
        damage(older)
    if case == "unfinished":
        newer.path.with_suffix(".json").unlink()
    if case == "of another run":
        (folder / "run_id").write_text("1\n")
    if case == "another mesh":
        for slot in (older, newer):
            of_another_mesh(slot)
    if case == "removed":
        shutil.rmtree(folder / "memory")
        (folder / "memory").mkdir()
    if case == "not recorded":
        records = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in records if '"step": 7' not in line))
    assert reported in start(None, folder=folder)
    assert losses_of(folder) == losses_of(undisturbed[0])


def test_a_run_that_is_done_again_takes_no_copies_of_other_settings(start, tmp_path):
    start(("step", 4))
    assert "beginning at step 0, as safety copies are of other settings\n" in start(None, "train.seed=1")


def test_a_run_that_has_diverged_leaves_nothing_to_resume_from(tmp_path, monkeypatch):
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(step_hooks, "_validate", lambda *_: {"validation_loss": float("nan")})
    with pytest.raises(DivergedError):
        train(config_in(tmp_path))
    assert losses_of(tmp_path).keys() == {1, 2, 3, 4, 5}
    assert [*(tmp_path / "memory").iterdir()] == []


def test_copies_that_fail_are_reported_once_and_cost_nothing(undisturbed, start, tmp_path, monkeypatch):
    written, writes = safety_files._write_at, []

    def write(file, array, offset) -> None:
        writes.append(file)
        if 100 < len(writes) < 200:
            raise OSError(28, os.strerror(28))
        written(file, array, offset)

    monkeypatch.setattr(safety_files, "_write_at", write)
    output = start(None)
    assert output.count("failed (No space left on device): the ones before stay, and the next are tried") == 1
    assert losses_of(tmp_path) == losses_of(undisturbed[0])


def test_no_room_for_copies_is_reported_before_the_first_step(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="cannot hold safety copies, twice") as reported:
        train(config_in(tmp_path))
    assert str(reported.value).endswith(
        " for each process (No space left on device, process 0): free some space, name another folder in memory, or "
        "use "
        "checkpoint.safety_copies_every=0"
    )
    assert list((tmp_path / "memory").glob("*/*/*")) == []
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("refused_in", ["compile_programs", "check_is_shared", "_open_log", "_open_checkpoints"])
def test_a_run_that_is_refused_leaves_no_memory_reserved_and_the_newest_copy(
    refused_in, crashed, tmp_path, monkeypatch
):
    def refuse(*_: object) -> None:
        raise ConfigError("refused")

    folder, copy = crashed
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(loop, refused_in, refuse)
    for config in (config_in(tmp_path), config_in(folder)):
        with pytest.raises(ConfigError, match=r"^refused$"):
            train(config)
    assert list((tmp_path / "memory").iterdir()) == [], "a first run"
    assert [slot.record.step for slot in slots(folder)] == [7], "a run that resumes from the newest copy"
