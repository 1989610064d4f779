"""Local copies of what is in buckets: whole, up to date, and uploaded where they change."""

import os
from pathlib import Path

import pytest

from moe_jax.distributed import failures
from moe_jax.errors import ConfigError
from moe_jax.files import local_copy
from moe_jax.files.local_copy import local_data, local_outline, local_path, upload, url_of
from moe_jax.files.object_store import StoreError
from moe_jax.files.places import all_uploaded_or_nothing, check_is_empty, output_folder, place_of
from moe_jax.files.upload import Uploads, upload_now
from moe_jax.paths import shown
from tests.object_server import Server

URL = "gs://bucket/runs/a"


def put(store: Server, **contents: str) -> None:
    for name, content in contents.items():
        store.objects[f"runs/a/{name}"] = (next(store.generations), content.encode())


def below(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_run_is_copied_without_its_checkpoints_and_lock_and_named_by_its_url(store: Server) -> None:
    put(store, **{"config.yaml": "a: 1", "trace/0/x": "t", "checkpoints/5/record": "c", "lock": "me", "empty/": ""})
    run = local_path(URL)
    assert below(run) == {"config.yaml": "a: 1", "trace/0/x": "t"}
    assert run.name == "a"
    assert (url_of(run), place_of(run), place_of(Path("x"))) == (URL, URL, "x")
    assert shown(f"log.dir={run}/metrics.jsonl is damaged") == f"log.dir={URL}/metrics.jsonl is damaged"
    assert local_path(URL) is run, "copied once"
    assert local_path("runs/a") == Path("runs/a")
    assert local_path(f"{URL}/config.yaml").read_text() == "a: 1", "a file"
    assert not local_path("gs://bucket/runs/none").exists()


def test_a_name_that_leads_out_of_the_copy_is_refused(store: Server) -> None:
    put(store, **{"../../etc/x": "mine"})
    with pytest.raises(StoreError, match="a file on this machine cannot have its name"):
        local_path(URL)


def test_an_outline_of_a_model_has_no_weights(store: Server) -> None:
    put(store, **{"config.json": "{}", "merges.txt": "m", "model.safetensors": "weights"})
    assert below(local_outline(URL)) == {"config.json": "{}", "merges.txt": "m", "model.safetensors": ""}
    assert below(local_path(URL)) == {"config.json": "{}", "merges.txt": "m", "model.safetensors": "weights"}
    assert local_outline(URL) == local_path(URL), "which is there"
    assert local_outline(f"{URL}/merges.txt").read_text() == "", "a text"


def test_what_has_changed_is_uploaded_and_nothing_else(store: Server) -> None:
    put(store, **{"config.yaml": "a: 1", "old": "o"})
    run = local_path(URL)
    before = dict(store.objects)
    upload(run)
    assert store.objects == before
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "old.part").write_text("unfinished")
    (run / "empty").touch()
    (run / "trace.part").mkdir()
    (run / "trace.part" / "x").write_text("unfinished")
    with Uploads(run):
        upload_now(run)
        assert store.objects.keys() - before.keys() == {"runs/a/metrics.jsonl"}
        (run / "old").write_text("newer")
    assert store.objects["runs/a/old"][1] == b"newer", "at the end"
    with Uploads(Path("elsewhere")):
        upload_now(Path("elsewhere"))


def test_a_file_that_vanishes_is_not_uploaded(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is about to be committed must not fail for it."""
    run = local_path(URL)
    run.mkdir()
    for name in "abc":
        (run / name).write_text(name)
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "b":
            path.unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with Uploads(run):
        upload_now(run)
    assert sorted(store.objects) == ["runs/a/a", "runs/a/c"]


def test_a_failed_upload_is_reported_once_and_raised_at_the_end(
    store: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = local_path(URL)
    run.mkdir()
    (run / "x").write_text("1")
    monkeypatch.setattr("moe_jax.files.object_store.ObjectFolder.write", _refused)
    uploads = Uploads(run)
    with pytest.raises(StoreError), uploads:
        _ = uploads._try(), uploads._try()
    assert capsys.readouterr().err == f"warning: not uploaded, and tried again later: {_text()}\n"


def _refused(*_: object) -> None:
    raise StoreError(13, "no right to read or write it", URL)


def _text() -> str:
    return str(StoreError(13, "no right to read or write it", URL))


def test_an_output_is_uploaded_whole_or_not_at_all(store: Server) -> None:
    out = output_folder(URL)
    check_is_empty("--out", out)
    (out / "weights").write_text("w")
    with pytest.raises(ZeroDivisionError):
        _upload_and_fail(out, store)
    assert not store.objects
    with all_uploaded_or_nothing(out):
        (out / "config.json").write_text("{}")
    assert set(store.objects) == {"runs/a/config.json"}
    with pytest.raises(ConfigError, match=f"^--out={URL} exists and is not an empty folder: name another one"):
        check_is_empty("--out", out)


def test_an_output_that_fails_deletes_only_its_own(store: Server) -> None:
    put(store, **{"checkpoints/step_1/model.pt": "of another program", "lock": "too"})
    before, out = dict(store.objects), output_folder(URL)
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        check_is_empty("--out", out)
    (out / "weights").write_text("w")
    with pytest.raises(ZeroDivisionError):
        _upload_and_fail(out, store)
    assert store.objects == before


def _upload_and_fail(out: Path, store: Server) -> None:
    with all_uploaded_or_nothing(out):
        upload(out)
        assert "runs/a/weights" in store.objects
        raise ZeroDivisionError


def test_an_output_next_to_what_is_read_hides_nothing(store: Server) -> None:
    put(store, **{"config.yaml": "of the run"})
    out = output_folder(URL)
    assert below(local_path(URL)) == {"config.yaml": "of the run"}
    (out / "loss.json").write_text("1")
    upload(out)
    assert set(store.objects) == {"runs/a/config.yaml", "runs/a/loss.json"}


def test_copies_are_removed_however_a_process_ends(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, **{"config.yaml": "of the run"})
    monkeypatch.setattr(local_copy, "_homes", [])
    copy = local_path(URL)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    failures._exit_now(0)
    assert not copy.exists()


def test_data_is_kept_and_only_what_changed_is_downloaded_again(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    put(store, **{"meta.json": "{}", "train.bin": "12345"})
    first = local_data(URL)
    assert below(first) == {"meta.json": "{}", "train.bin": "12345"}
    put(store, **{"meta.json": "{1}"})
    del store.objects["runs/a/train.bin"]
    put(store, **{"other.bin": "678"})
    monkeypatch.setattr("moe_jax.files.local_copy._copies", {})  # as in another process
    assert below(local_data(URL)) == {"meta.json": "{1}", "other.bin": "678"}
    put(store, **{"meta.json": "{2}"})
    other = os.stat(first / "other.bin")
    monkeypatch.setattr("moe_jax.files.local_copy._copies", {})
    assert (local_data(URL) / "meta.json").read_text() == "{2}"
    assert os.path.samestat(os.stat(first / "other.bin"), other), "not downloaded again"
