"""Checkpoints in a bucket: what is restored is what was saved, or the one before is. The lock of a run there."""

import os
import sys
import time
from pathlib import Path

import jax
import pytest

from moe_jax.checkpoint import bucket_writer
from moe_jax.checkpoint.bucket_writer import BucketWriter
from moe_jax.checkpoint.files import newest_checkpoint
from moe_jax.checkpoint.save_barrier import SaveBarrier
from moe_jax.checkpoint.storage import storage_of
from moe_jax.errors import CheckpointError, ConfigError, OutageError
from moe_jax.files.local_copy import local_path
from moe_jax.files.object_store import StoreError
from moe_jax.files.upload import Uploads
from moe_jax.run import bucket_lock, run_lock
from moe_jax.run.bucket_lock import BucketLock
from moe_jax.run.run_lock import Holder
from tests.gcs_server import GcsHandler
from tests.object_server import Server

sys.path.insert(0, str(Path(__file__).parents[2] / "profiling"))

import damaged_checkpoints as damaged

saving = damaged._checkpoints
URL = "gs://bucket/runs/a"
STEPS = "runs/a/checkpoints/"


@pytest.fixture
def run(store: Server) -> Path:
    """A run in a bucket with checkpoints of steps 1 and 2."""
    return damaged.saved_run(local_path(URL))


def steps(store: Server) -> list[str]:
    return sorted({name.removeprefix(STEPS).split("/")[0] for name in store.objects if name.startswith(STEPS)})


def replace(store: Server, name: str, content: bytes | None) -> None:
    if content is None:
        del store.objects[name]
    else:
        store.objects[name] = (next(store.generations), content)


def test_a_saved_state_is_restored_bit_for_bit_and_the_newest_are_kept(run: Path, store: Server) -> None:
    assert damaged._restored(run, at_least=2) == damaged.EQUAL
    with saving(run) as checkpoints:
        checkpoints.save(3, damaged.state_of(3), data={"next_index": 3})
        assert checkpoints.newest() == 3
    assert steps(store) == ["2", "3"]
    assert damaged._restored(run, at_least=3) == damaged.EQUAL


@pytest.mark.parametrize("part", ["manifest.ocdbt", "state/d/", "process_0/d/", "record/metadata", "_CHECKPOINT"])
@pytest.mark.parametrize("kind", ["gone", "cut", "bit"])
def test_damage_is_noticed(part: str, kind: str, run: Path, store: Server) -> None:
    names = [name for name in store.objects if name.startswith(f"{STEPS}2/") and part in name]
    content = store.objects[names[0]][1]
    flipped = bytes([content[0] ^ 1]) + content[1:]
    replace(store, names[0], {"gone": None, "cut": content[:-1], "bit": flipped}[kind])
    found = damaged._restored(run)
    assert found in damaged.NOTICED.values() or found == damaged.EQUAL
    if kind == "gone":
        assert newest_checkpoint(run) == 1 or "process_0/manifest" in names[0]


def test_a_save_that_was_killed_is_not_found_and_removed_at_the_next_start(run: Path, store: Server) -> None:
    del store.objects[f"{STEPS}2/_CHECKPOINT_METADATA"]
    assert newest_checkpoint(run) == 1
    with saving(run) as checkpoints:
        assert steps(store) == ["1"]
        checkpoints.save(2, damaged.state_of(2), data={"next_index": 2})
    assert damaged._restored(run, at_least=2) == damaged.EQUAL


def test_a_checkpoint_is_committed_after_the_records_of_its_steps(store: Server) -> None:
    run = local_path(URL)
    run.mkdir()
    with Uploads(run), saving(run) as checkpoints:
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        checkpoints.save(1, damaged.state_of(1), data={})
        assert checkpoints.newest() == 1
        generations = {name.removeprefix("runs/a/"): generation for name, (generation, _) in store.objects.items()}
        assert generations["metrics.jsonl"] < generations["checkpoints/1/_CHECKPOINT_METADATA"]
        assert max(generations.values()) == generations["checkpoints/1/_CHECKPOINT_METADATA"]


def test_a_failed_save_costs_only_itself(run: Path, store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(13, "no right")

    monkeypatch.setattr("moe_jax.checkpoint.save.upload_now", refused)
    with pytest.raises(CheckpointError) as reported, saving(run) as saves:
        saves.save(3, damaged.state_of(3), data={})
    assert "its last checkpoint, of step 3, was not saved ([Errno 13] no right): see to the network" in str(
        reported.value
    )
    assert steps(store) == ["1", "2"]


def test_a_save_has_time_for_its_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large checkpoints, a fixed time would save none. The barrier waits for the slowest process."""
    waits: list[int] = []
    monkeypatch.setattr(bucket_writer, "ANSWER_S", 2)
    monkeypatch.setattr(bucket_writer, "_SLOWEST", 10)
    monkeypatch.setattr(SaveBarrier, "__call__", lambda self, *, key, timeout_ms: waits.append(timeout_ms))
    state = damaged.state_of(3)
    seconds = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 10
    with saving(run) as checkpoints:
        checkpoints.save(3, state, data={"next_index": 3})
        assert checkpoints.newest() == 3
    assert waits == [round(2000 * (2 + seconds))] * 2
    monkeypatch.setattr(bucket_writer, "ANSWER_S", 0)
    monkeypatch.setattr(bucket_writer, "_SLOWEST", 1e12)
    stage, staged = BucketWriter._stage, []
    monkeypatch.setattr(BucketWriter, "_stage", lambda *args: staged.append(stage(*args)) or staged[0])
    late = r"of step 4, was not saved \(it took more than 0 s to write\)"
    with pytest.raises(CheckpointError, match=late), saving(run) as checkpoints:
        checkpoints.save(4, damaged.state_of(4), data={"next_index": 4})
    staged[0][0].future.exception()  # a late write ends here, or fails as its step is gone, and not in the next test


def test_a_damaged_checkpoint_is_moved_and_a_store_that_is_away_damages_none(
    run: Path, store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = storage_of(run).move(2, "quarantine/2", "its reason")
    assert moved == f"{URL}/checkpoints/quarantine/2"
    assert steps(store) == ["1", "quarantine"]
    assert store.objects[f"{STEPS}quarantine/2/reason.txt"][1] == b"its reason\n"
    assert f"{STEPS}quarantine/2/_CHECKPOINT_METADATA" in store.objects
    assert newest_checkpoint(run) == 1
    monkeypatch.setattr("moe_jax.files.object_store.ANSWER_S", 0.2)
    store.faults = {"unavailable": 1.0}
    with pytest.raises(CheckpointError, match="cannot be read"):
        newest_checkpoint(run)


@pytest.mark.parametrize("name", ["record%2Fmetadata", "state%2Fmanifest.ocdbt"])
def test_what_a_store_refuses_for_the_moment_is_not_damaged(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, f"2%2F{name}")
    damage: dict[int, str] = {}
    with pytest.raises(OutageError, match=r"no right to read or write it|PERMISSION_DENIED"):
        newest_checkpoint(run, damage)
    assert not damage


def test_a_refused_list_which_looks_empty_deletes_nothing(
    run: Path, store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's store sends an error as JSON, in which tensorstore finds no objects."""
    before = dict(store.objects)
    refuse(monkeypatch, "/o?", times=1)
    storage_of(run).delete_unfinished()
    refuse(monkeypatch, "/o?")
    storage_of(run).delete_unfinished()
    with pytest.raises(StoreError, match="no right to list it"):
        storage_of(run).prepare()
    assert store.objects == before


def refuse(monkeypatch: pytest.MonkeyPatch, part: str, times: int = 10**6) -> None:
    """Let the store answer requests of this in their address with 403."""
    answer, left = GcsHandler.do_GET, [times]

    def do_get(handler: GcsHandler) -> None:
        if part in handler.path and left[0] > 0:
            left[0] -= 1
            handler.send(403, b'{"error": {"code": 403}}')
        else:
            answer(handler)

    monkeypatch.setattr(GcsHandler, "do_GET", do_get)


def test_a_save_succeeds_though_answers_of_the_store_are_lost(store: Server) -> None:
    store.lost += 2 * ["1/state/ocdbt.process_0/manifest.ocdbt"]  # which is made, then changed
    run = damaged.saved_run(local_path(URL))
    assert not store.lost
    assert damaged._restored(run, at_least=2) == damaged.EQUAL
    assert steps(store) == ["1", "2"]


def test_a_lock_is_taken_though_the_answer_of_the_store_is_lost(store: Server) -> None:
    store.lost += ["lock"]
    with BucketLock(URL):
        assert not store.lost
        assert Holder.parse(store.objects["runs/a/lock"][1]).pid == os.getpid()


def test_one_run_at_a_time_has_the_lock(
    store: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (bucket_lock, run_lock):
        monkeypatch.setattr(module, "ENDING_S", 0)
    monkeypatch.setattr(bucket_lock, "_POLL_S", 0.01)
    monkeypatch.setattr(bucket_lock, "BEAT_S", 0.02)
    with BucketLock(URL) as lock:
        with pytest.raises(ConfigError, match=f"^log.dir={URL} is in use by process {os.getpid()} on host"):
            BucketLock(URL).__enter__()
        time.sleep(0.1)
        assert Holder.parse(store.objects["runs/a/lock"][1]).beats > 0
        lock.check()
        other = Holder("host", 77, "0", "another kernel", "", 1.0)
        replace(store, "runs/a/lock", other.content())
        time.sleep(0.1)
        with pytest.raises(ConfigError, match="was taken over by process 77 on host host"):
            lock.check()
    assert "runs/a/lock" in store.objects, "it is the other's"
    monkeypatch.setattr(bucket_lock, "SILENCE_S", 0.05)
    with BucketLock(URL):
        assert Holder.parse(store.objects["runs/a/lock"][1]).pid == os.getpid()
    assert "runs/a/lock" not in store.objects
    assert capsys.readouterr().out.endswith("process 77 on host host, which trained there, is gone: taken over\n")
