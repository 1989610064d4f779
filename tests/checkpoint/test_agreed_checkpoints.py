"""Two processes whose disks fail apart save together or not at all, and read one and the same checkpoint."""

import json
from pathlib import Path

import pytest

from moe_jax.checkpoint import latest as newest
from moe_jax.checkpoint.latest import agreed_newest
from moe_jax.errors import CheckpointError
from tests.launch.test_launch import run


def test_a_save_that_one_process_cannot_write_fails_for_all_and_the_next_is_tried(tmp_path: Path) -> None:
    """And a checkpoint that one of them finds damaged is read by none."""
    code, out, err = run("--processes=2", "--retries=0", "--module=tests.launched.saves", str(tmp_path))
    assert code == 0, err
    lines = err.splitlines()
    for rank, reason in (("", "another process cannot read it"), ("[rank 1] ", "a file is cut")):
        reported = [line.removeprefix(rank) for line in lines if line.startswith("[rank 1]") == bool(rank)]
        assert reported == [
            f"newest after step {step}: {saved}" for step, saved in ((1, 1), (2, 1), (3, 1), (4, 4))
        ] + [f"newest: 1, {{4: '{reason}'}}"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["failed_saves"]) for record in records] == [(2, 1), (3, 2)]
    assert records[0]["alarm"] == (
        "the checkpoint of step 2 was not saved (another process failed), the newest is of step 1: see to its disk"
    )
    reported = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert reported == [f"warning: {record['alarm']}" for record in records]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "4"]


def test_processes_with_other_folders_get_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has none, and another one step 7."""
    given = iter([[0, 2 + 7], [0, 1]])
    monkeypatch.setattr(newest, "allgather", lambda own: next(given))
    with pytest.raises(CheckpointError) as refusal:
        agreed_newest(tmp_path, {})
    assert str(refusal.value) == (
        f"{tmp_path}/checkpoints is not the same on all processes (they find steps none, 7): "
        "put log.dir on a disk that all share"
    )
