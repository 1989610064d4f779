"""Two processes whose disks fail apart save together or not at all, and read one and the same checkpoint."""

import json
from pathlib import Path

import pytest

from moe_jax.checkpoint import latest
from moe_jax.checkpoint.latest import agreed_newest
from moe_jax.errors import CheckpointError, OutageError
from tests.launch.test_launch import run


def test_a_save_that_one_process_cannot_write_fails_for_all_and_the_next_is_tried(tmp_path: Path) -> None:
    """And a checkpoint that one of them finds damaged is read by none."""
    code, out, err = run("--processes=2", "--retries=0", "--module=tests.launched.saves", str(tmp_path))
    assert code == 0, err
    lines = err.splitlines()
    for rank, reason in (("", "process 1: a file is cut"), ("[rank 1] ", "a file is cut")):
        reported = [line.removeprefix(rank) for line in lines if line.startswith("[rank 1]") == bool(rank)]
        assert reported == [
            f"newest after step {step}: {saved}" for step, saved in ((1, 1), (2, 1), (3, 1), (4, 4))
        ] + [f"newest: 1, {{4: '{reason}'}}"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["failed_saves"]) for record in records] == [(2, 1), (3, 2)]
    began, _, ended = records[0]["alarm"].partition("Error writing")
    assert began == "the checkpoint of step 2 was not saved (process 1: OUT_OF_RANGE: ", (
        "says whose disk it is, and why"
    )
    assert ended.endswith("), the newest is of step 1: see to its disk")
    reported = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert reported == [f"warning: {record['alarm']}" for record in records]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "4"]


def test_processes_with_other_folders_get_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has none, and another one step 7; listings of a folder may be old for a while."""
    seen = iter([[0, 9], [0, 0], [0, 9], [1, 1]])  # twice: what they find, and whether it takes too long
    monkeypatch.setattr(latest, "first_problem", lambda own: own)
    monkeypatch.setattr(latest, "allgather", lambda own: next(seen))
    monkeypatch.setattr(latest, "_POLL_S", 0)
    with pytest.raises(CheckpointError) as refusal:
        agreed_newest(tmp_path, {})
    assert str(refusal.value) == (
        f"{tmp_path}/checkpoints is not the same on all processes (they find steps none, 7): "
        "put log.dir on a disk that all share"
    )


def test_an_old_listing_and_no_damage_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds step 1, the other one step 2, until this one sees it, too."""
    found, damage = iter([1, 2]), dict[int, str]()
    monkeypatch.setattr(latest, "newest_checkpoint", lambda run, damaged: next(found))
    monkeypatch.setattr(latest, "first_problem", lambda own: own)
    monkeypatch.setattr(latest, "allgather", lambda own: [own, 0 if own is False else 4])
    monkeypatch.setattr(latest, "_POLL_S", 0)
    assert agreed_newest(tmp_path, damage) == 2
    assert not damage


def test_what_one_process_cannot_read_now_is_damaged_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage: dict[int, str] = {}
    monkeypatch.setattr(latest, "newest_checkpoint", lambda run, damaged: 2)
    monkeypatch.setattr(latest, "first_problem", lambda own: own or "process 3: no answer in 600 s")
    with pytest.raises(OutageError, match=f"^{tmp_path}/checkpoints: process 3: no answer in 600 s$"):
        agreed_newest(tmp_path, damage)
    assert not damage
    assert OutageError.exit_code == 75, "the launcher tries again"
