"""The folder of a run is one that all its processes see, and its records are read by one of them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError
from moe_jax.paths import COPIES
from moe_jax.run import run_dir
from moe_jax.run.run_dir import check_is_shared, resume_step, steps_in_records
from moe_jax.telemetry.run_log import MetricsError


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """What processes gather, of which this is number 1 of three and the others see their folder; noted here."""
    found: list[Sequence[int]] = []

    def gather(number: int) -> list[int]:
        found.append([1, number, 1])
        return [1, number, 1]

    monkeypatch.setattr(run_dir, "allgather", gather)
    monkeypatch.setattr(run_dir, "_POLL_S", 0.001)
    monkeypatch.setattr(run_dir, "SHOWN_S", 0.01)
    return found


@pytest.mark.parametrize("there", [None, {"run": "another"}, {}])
def test_a_folder_that_is_not_shared_is_refused_by_all(there, gathered, tmp_path: Path) -> None:
    """A host with a folder of its own would write checkpoints that nobody can read."""
    if there is not None:
        (tmp_path / "provenance.json").write_text(json.dumps(there))
    with pytest.raises(ConfigError) as refusal:
        check_is_shared(tmp_path, "mine")
    assert str(refusal.value) == (
        f"log.dir={tmp_path} is not the same folder on all processes (not seen by process 1): put log.dir on a disk "
        "that all share, or in a bucket"
    )
    assert gathered == [[1, 0, 1], [1, 0, 1]], "a barrier, and what each has seen"


def test_a_process_that_sees_it_is_refused_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "provenance.json").write_text('{"run": "mine"}')
    monkeypatch.setattr(run_dir, "allgather", lambda own: [own, *[0] * 10])
    with pytest.raises(ConfigError, match=r"not seen by processes 1, 2, 3, 4, 5, 6, 7, 8, …\)"):
        check_is_shared(tmp_path, "mine")


def test_a_slow_disk_may_show_it_later(gathered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the copies of a folder in a bucket are not shared."""
    shown = iter(["", "", "mine"])
    monkeypatch.setattr(run_dir, "saved_run_id", lambda folder: next(shown))
    monkeypatch.setattr(run_dir, "SHOWN_S", 60)
    check_is_shared(tmp_path, "mine")
    monkeypatch.setitem(COPIES, str(tmp_path), "gs://bucket/run")
    check_is_shared(tmp_path, "mine")
    assert len(gathered) == 2


def test_the_records_of_a_run_are_read_by_process_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be larger than a host's memory, and a disk that all share would be read by all at once."""
    (tmp_path / "metrics.jsonl").write_text("damaged\nrecords\n")
    monkeypatch.setattr(run_dir, "agreed_newest", lambda folder, damaged: 3)
    monkeypatch.setattr(run_dir, "check_same_run", lambda config, folder, step: None)
    monkeypatch.setattr(run_dir, "is_main_process", lambda: False)
    monkeypatch.setattr(run_dir, "from_process", lambda source, value: [7, [4, 6], ""])
    config = load_config(overrides=["train.steps=5"])
    assert resume_step(config, tmp_path, {}) == 3
    assert steps_in_records(tmp_path) == (7, {4, 6})
    monkeypatch.setattr(run_dir, "from_process", lambda source, value: [0, [], "line 1 is damaged"])
    with pytest.raises(MetricsError, match="line 1 is damaged"):
        resume_step(config, tmp_path, {})
