"""A disk that is full, fills up while a model is written, or is read-only; and who may read what is written."""

import errno
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from safetensors import SafetensorError

from moe_jax.cli import convert
from moe_jax.convert import files
from moe_jax.convert.families import family_that_holds
from moe_jax.convert.write import write_model
from moe_jax.errors import UserError, run_command
from tests.convert.golden import GOLDEN, model_of, read

NAME = "qwen3_moe"
Usage = namedtuple("Usage", "total used free")


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path) -> str:
    """What an import says, if it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["convert", "import", str(GOLDEN / NAME), "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        run_command(convert.main)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_an_import_asks_for_room_before_it_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6, 100))
    reported = refused(monkeypatch, capsys, tmp_path / "in" / "run")
    assert reported == (
        f"error: --out={tmp_path}/in/run has no room for a checkpoint (it takes 231.7 kB and leaves 1.0 MB free, and "
        "there are 0.1 kB left): free some space, or use another one\n"
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("existed", [False, True])
def test_a_disk_that_fills_up_during_an_import_keeps_nothing(existed, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    if existed:
        run.mkdir()

    def save(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run / "checkpoints"))

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    reported = refused(monkeypatch, capsys, run)
    assert reported == (
        f"error: --out={run} was not written (no room on the disk): free some space, or name another folder\n"
    )
    assert list(tmp_path.rglob("*")) == ([run] if existed else [])


def test_a_disk_that_fills_up_during_an_export_keeps_nothing(tmp_path, monkeypatch):
    """safetensors has an error of its own."""

    def save_file(tensors: object, file: Path, **_: object) -> None:
        file.write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", save_file)
    model, out = model_of(NAME), tmp_path / "in" / "out"
    with pytest.raises(UserError) as refusal:
        write_model(out, model, family_that_holds(model), read(GOLDEN / NAME), "float32", 64, GOLDEN / NAME)
    assert str(refusal.value) == f"{out}: no room on that disk: free some space, or name another folder"
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_reported_by_the_name_that_was_given(tmp_path, monkeypatch):
    def mkdtemp(_: object, prefix: str, folder: Path) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{folder}/{prefix}x1y2")

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    model, out = model_of(NAME), tmp_path / "out"
    with pytest.raises(UserError) as refusal:
        write_model(out, model, family_that_holds(model), read(GOLDEN / NAME), "float32", 64, GOLDEN / NAME)
    assert str(refusal.value) == f"{out}: Read-only file system: name another folder"
    assert not any(tmp_path.iterdir())


def test_others_may_read_exported_weights_as_they_may_read_any_new_file(tmp_path):
    model, out = model_of(NAME), tmp_path / "out"
    write_model(out, model, family_that_holds(model), read(GOLDEN / NAME), "float32", 64, GOLDEN / NAME, 30_000)
    (tmp_path / "new").touch()
    assert len(list(out.glob("*.safetensors"))) > 1
    assert {file.stat().st_mode for file in out.iterdir()} == {(tmp_path / "new").stat().st_mode}
