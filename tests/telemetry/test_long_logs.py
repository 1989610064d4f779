"""The records of a long run are read one at a time."""

import json
import tracemalloc
from pathlib import Path

import pytest

from moe_jax.telemetry import run_log
from moe_jax.telemetry.run_log import MetricsError, insert_record, read_metrics, recorded_steps
from tests.telemetry.test_run_log import write_steps


def test_a_resume_holds_one_record_at_a_time_whatever_the_size_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of a long run are many times larger than one, and so than what a restart may need of memory."""
    record, num_records = {"step": 1, "loss": 1.0, "expert_load": [[0.5] * 64] * 16}, 400
    line = json.dumps(record) + "\n"
    (tmp_path / "metrics.jsonl").write_text(line * num_records + '{"step": 2, "loss": 2.0}\n')
    monkeypatch.setattr(run_log, "_MAX_BYTES", len(line))  # of readers that hold all records
    tracemalloc.start()
    write_steps(tmp_path, range(0), start_step=1)
    assert recorded_steps(tmp_path) == (1, frozenset())
    insert_record(tmp_path, {"step": 1, "validation_loss": 1.0})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").read_text() == line * num_records + '{"step": 1, "validation_loss": 1.0}\n'
    assert recorded_steps(tmp_path) == (1, {1})
    assert peak < num_records * len(line) / 3
    with pytest.raises(MetricsError, match=r"has more than .* bytes: read a copy"):
        read_metrics(tmp_path)


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("7" * 1000)
    monkeypatch.setattr(run_log, "_MAX_LINE", 100)
    with pytest.raises(MetricsError, match=r"line 1 is not a record of metrics \(it has more than 100 bytes\)"):
        read_metrics(tmp_path)
