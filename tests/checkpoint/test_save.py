"""Checkpoints cannot lie: what is restored is what was saved, or the one before is."""

import errno
import json
import random
import resource
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.checkpoint.arrays import read_arrays
from moe_jax.checkpoint.checksums import digest_program
from moe_jax.checkpoint.files import check_files, newest_checkpoint
from moe_jax.checkpoint.orbax_writer import OrbaxWriter
from moe_jax.checkpoint.save import Checkpoints
from moe_jax.checkpoint.storage import storage_of
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.telemetry.run_log import RunLog, read_metrics

sys.path.insert(0, str(Path(__file__).parents[2] / "profiling"))

import damaged_checkpoints as damaged

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool")


def numbers(dtype: str) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2, (8, 3, 4)).astype(jnp.dtype(dtype))


def placed(x: np.ndarray, devices: int) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:devices]), "x")
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))


def digest(x: jax.Array) -> tuple[int, int]:
    return tuple(np.asarray(digest_program([x])([x]))[0].tolist())


def slow_digest(x: np.ndarray) -> tuple[int, int]:
    """In whole numbers, one element after another."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
        word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
        return word ^ (word >> 16)

    words = np.ravel(x).view(f"uint{8 * x.dtype.itemsize}").tolist()
    weighted = sum(word * (2 * index + 1) for index, word in enumerate(words))
    return weighted % 2**32, sum(mix(word ^ mix(index)) for index, word in enumerate(words)) % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_the_same_however_an_array_is_cut(dtype: str) -> None:
    x = numbers(dtype)
    assert {digest(placed(x, devices)) for devices in (1, 2, 8)} == {slow_digest(x)}


def test_any_flipped_bit_changes_both_sums_and_two_signs_one() -> None:
    x = np.random.default_rng(1).standard_normal((8, 5), np.float32)
    rng, before = random.Random(0), digest(placed(x, 1))
    for _ in range(50):
        word, bit = rng.randrange(x.size), rng.randrange(32)
        flipped = x.copy()
        flipped.reshape(-1).view(np.uint32)[word] ^= np.uint32(1 << bit)
        assert all(new != old for new, old in zip(digest(placed(flipped, 1)), before, strict=True))
    x[0, :2] *= -1
    first, second = digest(placed(x, 1))
    assert first == before[0], "or one sum would do"
    assert second != before[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run's folder with checkpoints of steps 1 and 2."""
    return damaged.saved_run(tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize("kind", damaged.KINDS)
def test_damage_is_noticed_or_without_effect(kind: str, run: Path) -> None:
    rng = random.Random(kind)
    outcomes = {damaged.damage(run, rng, kind) for _ in range(100)}
    assert {damaged.EQUAL, damaged.NOTICED["files"]} <= outcomes <= {damaged.EQUAL, *damaged.NOTICED.values()}


def test_the_newest_committed_checkpoint_outlives_kills(tmp_path: Path) -> None:
    assert set(damaged.killed(tmp_path / "run", random.Random(0), 8)) == {damaged.EQUAL}


def test_folders_are_not_trusted_for_their_names(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "9").mkdir()
    (folder / "2").rename(folder / "7")
    mark = folder / "7" / "_CHECKPOINT_METADATA"
    committed = mark.read_text()
    try:
        found: dict[int, str] = {}
        assert newest_checkpoint(run, found) == 1
        assert found == {9: "_CHECKPOINT_METADATA is missing", 7: "it holds step 2"}
        mark.write_text(json.dumps(json.loads(committed) | {"commit_timestamp_nsecs": None}))
        found = {}
        assert newest_checkpoint(run, found) == 1
        assert found[7] == "it was not committed"
    finally:
        mark.write_text(committed)
        (folder / "7").rename(folder / "2")
        (folder / "9").rmdir()


def test_arrays_of_another_shape_or_type_are_refused(run: Path) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), damaged.state_of(0))
    w = shapes["params"]["w"]
    wide = jax.ShapeDtypeStruct((32, 49), w.dtype, sharding=w.sharding)
    half = jax.ShapeDtypeStruct(w.shape, jnp.bfloat16, sharding=w.sharding)
    for other, here in ((wide, "float32[32, 49]"), (half, "bfloat16[32, 48]")):
        with pytest.raises(CheckpointError) as refused:
            read_arrays(run, check_files(run, 2), shapes | {"params": shapes["params"] | {"w": other}})
        assert str(refused.value) == (
            f"the checkpoint {run}/checkpoints/2 has float32[32, 48] as params.w, and this run {here}: "
            "use the settings that it was made with, or another log.dir"
        )
    with pytest.raises(CheckpointError, match=r"has bfloat16\[24\] as params.scale, and this run none: use"):
        read_arrays(run, check_files(run, 2), {"params": {"w": w}})


def test_a_save_that_fails_is_reported_and_the_next_one_tried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No file may grow beyond some kilobytes for a while, which orbax finds out in its threads."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit_to(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, unlimited[1]))

    def save(checkpoints: Checkpoints, step: int, num_bytes: int) -> None:
        limit_to(num_bytes)
        try:
            checkpoints.save(step, damaged.state_of(step), data={})
            checkpoints._finish()
        finally:
            limit_to(unlimited[0])

    log = RunLog(tmp_path, start_step=0, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=False)
    about = {"config": {}, "mesh": {}, "versions": {}}
    digests = digest_program(damaged.state_of(0))
    with log, Checkpoints(tmp_path, 2, log, digests, about) as checkpoints:
        for step, num_bytes in ((1, unlimited[0]), (2, 4000), (3, 4000), (4, unlimited[0])):
            save(checkpoints, step, num_bytes)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["failed_saves"]) for record in records] == [(2, 1), (3, 2)]
    assert records[0]["alarm"].startswith("the checkpoint of step 2 was not saved (")
    assert records[0]["alarm"].endswith("), the newest is of step 1: see to its disk")
    output = capfd.readouterr()
    assert output.out == "".join(f"warning: {record['alarm']}\n" for record in records)
    assert output.err == ""
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "4"]
    assert newest_checkpoint(tmp_path) == 4

    log = RunLog(tmp_path, start_step=4, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=True)
    with (
        pytest.raises(
            CheckpointError, match=r"^log.dir=.*: its last checkpoint, of step 5, was not saved \(.* step 4$"
        ),
        Checkpoints(tmp_path, 2, log, digests, about) as checkpoints,
    ):
        save(checkpoints, 5, 4000)
    assert newest_checkpoint(tmp_path) == 4


def test_remains_of_a_save_are_deleted_though_threads_still_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remains, delete, tries = tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp", shutil.rmtree, []
    (remains / "state").mkdir(parents=True)

    def delete_most(folder: Path) -> None:
        delete(folder / "state", ignore_errors=True)
        tries.append(folder)
        if len(tries) < 3:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        delete(folder)

    monkeypatch.setattr(shutil, "rmtree", delete_most)
    storage_of(tmp_path).prepare()
    assert tries == 3 * [remains]
    assert not remains.exists()


def saving(folder: Path, keep: int = 2, start_step: int = 0) -> tuple[RunLog, Checkpoints]:
    log = RunLog(folder, start_step, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=False)
    about = {"config": {}, "mesh": {}, "versions": {}}
    return log, Checkpoints(folder, keep, log, digest_program(damaged.state_of(0)), about)


def alarms_of(folder: Path) -> list[str]:
    return [record["alarm"] for record in read_metrics(folder) if "alarm" in record]


def test_a_save_that_cannot_be_read_back_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though only one is kept, and orbax takes it for saved."""
    wait = OrbaxWriter.wait_until_finished

    def losing_a_file(writer: Any) -> None:
        wait(writer)
        (tmp_path / "checkpoints" / "2" / "state" / "manifest.ocdbt").unlink(missing_ok=True)

    monkeypatch.setattr(OrbaxWriter, "wait_until_finished", losing_a_file)
    log, checkpoints = saving(tmp_path, keep=1)
    with log, checkpoints:
        for step in (1, 2):
            checkpoints.save(step, damaged.state_of(step), data={})
        assert checkpoints.newest() == 1
        checkpoints.save(3, damaged.state_of(3), data={})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "quarantine"]
    assert alarms_of(tmp_path) == [
        "the checkpoint of step 2 was not saved (it cannot be read back: state/manifest.ocdbt is missing), the newest "
        "is of step 1: see to its disk"
    ]


@pytest.mark.parametrize("what", ["one", "all", "the run's folder"])
def test_checkpoints_deleted_meanwhile_are_missed_at_the_next_save(what: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    log, checkpoints = saving(run)
    with log, checkpoints:
        for step in (1, 2):
            checkpoints.save(step, damaged.state_of(step), data={})
        assert checkpoints.newest() == 2
        shutil.rmtree({"one": run / "checkpoints" / "1", "all": run / "checkpoints", "the run's folder": run}[what])
        checkpoints.save(3, damaged.state_of(3), data={})
    assert newest_checkpoint(run) == 3
    steps = {"one": "1"}.get(what, "1, 2")
    assert f"checkpoints of steps {steps} in {run}/checkpoints were deleted during the run" in alarms_of(run)


def test_a_folder_that_cannot_be_written_any_more_is_tried_again_at_each_save(tmp_path: Path) -> None:
    """A file stands there for a while, which stops root as well."""
    folder = tmp_path / "checkpoints"
    log, checkpoints = saving(tmp_path)
    with log, checkpoints:
        checkpoints.save(1, damaged.state_of(1), data={})
        assert checkpoints.newest() == 1
        folder.rename(tmp_path / "away")
        folder.write_text("in the way")
        checkpoints.save(2, damaged.state_of(2), data={})
        assert checkpoints.newest() is None
        folder.unlink()
        (tmp_path / "away").rename(folder)
        checkpoints.save(3, damaged.state_of(3), data={})
    assert sorted(path.name for path in folder.iterdir()) == ["1", "3"]
    assert alarms_of(tmp_path)[-1] == (
        f"the checkpoint of step 2 was not saved ({folder} cannot be written: File exists), none is there yet: "
        "see to it"
    )


def test_a_folder_that_cannot_be_written_is_refused_before_orbax_has_threads(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    log, checkpoints = saving(tmp_path)
    before = threading.active_count()
    with pytest.raises(ConfigError) as refused, log, checkpoints:
        pytest.fail("it cannot be entered")
    assert str(refused.value) == (
        f"log.dir={tmp_path}: {tmp_path}/checkpoints cannot be written (File exists): make it a folder that can be, or "
        "use another log.dir"
    )
    assert threading.active_count() == before


def test_a_run_below_another_folder_s_parent_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    log, checkpoints = saving(Path("../runs/a"))
    with log, checkpoints:
        checkpoints.save(1, damaged.state_of(1), data={})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), damaged.state_of(0))
    for run in (Path("../runs/a"), tmp_path / "runs" / "a"):
        assert newest_checkpoint(run) == 1
        chex.assert_trees_all_equal(read_arrays(run, check_files(run, 1), shapes), damaged.state_of(1))


def test_a_resumed_run_of_many_processes_saves_when_it_is_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the step that they agree on, after a checkpoint of the run before."""
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
    log = RunLog(tmp_path, start_step=0, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=True)
    about, digests = {"config": {}, "mesh": {}, "versions": {}}, digest_program(damaged.state_of(0))
    for step in (1, 2):
        with Checkpoints(tmp_path, 2, log, digests, about) as checkpoints:
            checkpoints.save(step, damaged.state_of(step), data={})
    assert newest_checkpoint(tmp_path) == 2
