"""What a run writes: strict JSON, each step once, and a progress line a person can read."""

import io
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_jax.files.atomic import write_atomically
from moe_jax.telemetry.run_log import (
    MetricsError,
    RunLog,
    format_line,
    human_count,
    human_seconds,
    insert_record,
    read_metrics,
)
from tests.test_files import on_a_full_disk

RECORD = {
    "step": 120,
    "loss": 2.3141,
    "tokens_per_s": 41234.0,
    "step_s": 0.3121,
    "mfu": 0.3812,
    "dropped_fraction": 0.0041,
    "load_max_over_mean": 1.318,
    "expert_load": [[0.25, 0.75], [0.5, 0.5]],
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_log(folder: Path, start_step: int = 0, **changes: Any) -> RunLog:
    return RunLog(
        **{
            "folder": folder,
            "start_step": start_step,
            "total_steps": 1000,
            "tokens_per_step": 64,
            "tensorboard": False,
            "quiet": False,
            **changes,
        }
    )


def write_steps(folder: Path, steps: range, start_step: int = 0, loss: float = 1.0) -> None:
    with open_log(folder, start_step) as log:
        for step in steps:
            log.write({"step": step, "loss": loss, "step_s": 0.1})


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder)]


def test_progress_line_is_exactly_this() -> None:
    assert format_line(RECORD, total_steps=1000, eta_s=275.4) == (
        "step  120/1000  loss 2.314  41.2k tok/s  312 ms/step  MFU 38.1%  dropped 0.4%  load max/mean 1.32  ETA 4m35s"
    )


def test_progress_line_shows_that_few_pairs_were_dropped() -> None:
    texts = {0.0: "dropped 0.0%", 1e-6: "dropped <0.1%", 6e-4: "dropped 0.1%"}
    for fraction, text in texts.items():
        assert text in format_line({"step": 1, "dropped_fraction": fraction}, total_steps=1, eta_s=0)


def test_a_warning_is_a_line_and_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(tmp_path) as log:
        log.warn("rows were dropped")
    assert capsys.readouterr().out == "warning: rows were dropped\n"
    assert read_metrics(tmp_path) == []


def test_progress_line_of_a_dense_model_on_unknown_hardware_leaves_out_what_it_lacks() -> None:
    record = {"step": 7, "loss": float("nan"), "tokens_per_s": 950.0, "step_s": 1.2345, "expert_load": []}
    assert format_line(record, total_steps=10, eta_s=3.7) == "step  7/10  loss nan  950 tok/s  1.23 s/step  ETA 4s"


def test_progress_line_gives_up_details_but_not_the_eta_on_a_narrow_terminal() -> None:
    assert format_line(RECORD, 1000, 275.4, width=60) == "step  120/1000  loss 2.314  41.2k tok/s  ETA 4m35s"
    assert format_line(RECORD, 1000, 275.4, width=5) == "step  120/1000  ETA 4m35s"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.7, "1.00k"),
        (41234, "41.2k"),
        (412_345, "412k"),
        (999_700, "1.00M"),
        (5e13, "50.0T"),
    ],
)
def test_counts_keep_three_digits_across_units(number: float, text: str) -> None:
    assert human_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.5e-5, "85.0 µs"),
        (0.00321, "3.21 ms"),
        (0.9997, "1.00 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (1234, "1234 s"),
    ],
)
def test_times_keep_three_digits_across_units(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(35, "35s"), (59.6, "1m00s"), (3725, "1h02m"), (183_600, "2d03h")])
def test_eta_is_read_at_a_glance(seconds: float, text: str) -> None:
    assert format_line({"step": 1}, total_steps=1, eta_s=seconds) == f"step 1/1  ETA {text}"


def test_printed_lines_have_an_eta_from_recent_steps_and_validation_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(tmp_path) as log:
        log.write({"step": 250, "loss": 2.0, "step_s": 1.0})
        log.write({"step": 250, "validation_loss": 1.912})
        log.write({"step": 300, "loss": 1.5, "step_s": 7.0})
        log.write({"step": 500, "loss": 1.5, "step_s": 3.0})
        log.write({"step": 500, "validation_loss": 1, "validation_loss/web": 1.2, "validation_loss/code": 0.9})
    assert capsys.readouterr().out.splitlines() == [
        "step  250/1000  loss 2.000  1.00 s/step  ETA 12m30s",
        "step 250 validation loss 1.912 nats per token (2.758 bits)",
        "step  300/1000  loss 1.500  7.00 s/step  ETA 23m20s",
        "step  500/1000  loss 1.500  3.00 s/step  ETA 20m00s",
        "step 500 validation loss 1.000 nats per token (1.443 bits): web 1.200, code 0.900",
    ]


def test_terminal_line_is_overwritten_and_validation_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with open_log(tmp_path, total_steps=3) as log:
        for step in (1, 2, 3):
            log.write({"step": step, "loss": 1.0, "step_s": 2.0})
            if step == 2:
                log.write({"step": 2, "validation_loss": 1.0})
    assert terminal.getvalue() == (
        "step 1/3  loss 1.000  2.00 s/step  ETA 4s\r\x1b[2K"
        "step 2/3  loss 1.000  2.00 s/step  ETA 2s\n"
        "step 2 validation loss 1.000 nats per token (1.443 bits)\n"
        "step 3/3  loss 1.000  2.00 s/step  ETA 0s\n"
    )


def test_quiet_log_of_another_process_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(tmp_path / "run", quiet=True, tensorboard=True) as log:
        log.write(RECORD)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_records_are_on_disk_at_once_and_say_how_many_tokens_were_seen(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.write(RECORD)
        assert read_metrics(tmp_path) == [{**RECORD, "tokens": 120 * 64}]


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 8), loss=1.0)
    write_steps(tmp_path, range(5, 11), start_step=4, loss=2.0)
    assert steps_of(tmp_path) == list(range(1, 11))
    assert [record["loss"] for record in read_metrics(tmp_path)] == [1.0] * 4 + [2.0] * 6


def test_new_run_in_an_old_folder_starts_with_no_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("damaged\nrecords\n")
    write_steps(tmp_path, range(1, 3))
    assert steps_of(tmp_path) == [1, 2]


def test_torn_last_line_is_left_out_and_gone_after_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    assert steps_of(tmp_path) == [1, 2]
    write_steps(tmp_path, range(3, 5), start_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_last_line_without_its_newline_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    write_steps(tmp_path, range(3, 4), start_step=2)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_an_inserted_record_is_after_those_of_its_step(tmp_path: Path) -> None:
    """And goes when a run resumes from an earlier one. A torn last line goes with it."""
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    insert_record(tmp_path, {"step": 2, "value": float("inf")})
    assert [(record["step"], "value" in record) for record in read_metrics(tmp_path)] == [
        *((1, False), (2, False), (2, True), (3, False)),
    ]
    assert read_metrics(tmp_path)[2]["value"] == float("inf")
    write_steps(tmp_path, range(2, 3), start_step=1)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    insert_record(tmp_path / "new", {"step": 0, "value": 1.0})
    assert read_metrics(tmp_path / "new") == [{"step": 0, "value": 1.0}]


def test_nan_and_infinity_are_strict_json_and_come_back(tmp_path: Path) -> None:
    record = {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "expert_load": [[float("nan"), 0.5]]}
    with open_log(tmp_path) as log:
        log.write({**record, "step_s": 0.1})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for _ in range(2):  # a resume writes the records again
        written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
        assert written["loss"] is None
        assert written["not_finite"] == {"loss": "nan", "grad_norm": "inf"}
        read = read_metrics(tmp_path)[0]
        assert str(read["loss"]) == "nan"
        assert read["grad_norm"] == float("inf")
        assert read["expert_load"] == [[None, 0.5]]
        assert "not_finite" not in read
        write_steps(tmp_path, range(0), start_step=1)


STEP = "its step is not a whole number from 0 to 2147483647"
DAMAGED = {
    "{torn": "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    "3": "it is no JSON object",
    '{"loss": 1.0}': STEP,
    '{"step": true}': STEP,
    '{"step": -1}': STEP,
    '{"step": 2147483648}': STEP,
    '{"step": 2, "not_finite": {"step": "nan"}}': STEP,
    '{"step": 2, "not_finite": {"loss": [1]}}': "its not_finite holds no numbers",
    '{"step": 2, "loss": "low"}': "its loss is not a number",
    '{"step": 2, "grad_norm": true}': "its grad_norm is not a number",
    '{"step": 2, "mfu": [0.5]}': "its mfu is not a number",
    '{"step": 2, "loss": 1e300}': "its loss is beyond 1e+39",
    f'{{"step": 2, "loss": 1{"0" * 400}}}': "it is not JSON: it has a whole number of 401 digits",
    f'{{"step": 2, "note": {"[" * 9999}{"]" * 9999}}}': "it is not JSON: it is nested more than 64 deep",
    '{"step": 2, "expert_load": [0.5]}': "its expert_load is not a list of lists",
    '{"step": 2, "expert_load": [[0.5, 0.5], [1.0]]}': "its expert_load has rows of several lengths, or of none",
    '{"step": 2, "expert_load": [["even"]]}': "its expert_load is not a number",
    '{"step": 2, "rank_load": [1.0, 1.5]}': "its rank_load has 2 numbers, and 1 before",
    '{"step": 2, "rank_load": 1.0}': "its rank_load is not a list of numbers",
    '{"step": 2, "rank_load": [1.0], "migrated_blocks": [1]}': (
        "its migrated_blocks are not numbers of the blocks in its rank_load"
    ),
    '{"step": 2, "rank_load": [1.0], "migrated_blocks": [0]}': (
        "its migrated_blocks come without migration_swaps and migration_load_after"
    ),
}


@pytest.mark.parametrize(("line", "reason"), DAMAGED.items(), ids=lambda text: text[:60])
def test_damage_in_the_middle_is_named_and_not_overwritten(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "rank_load": [1.0]}}\n{line}\n{{"step": 3}}\n')
    before = path.read_text()
    for read in (lambda: read_metrics(tmp_path), lambda: write_steps(tmp_path, range(4, 5), start_step=3)):
        with pytest.raises(MetricsError) as error:
            read()
        assert str(error.value) == f"{path} line 2 is not a record of metrics ({reason}): delete the line"
    assert path.read_text() == before


def test_wrong_folders_are_answered_with_a_cure(tmp_path: Path) -> None:
    write_steps(tmp_path / "shakespeare", range(1))
    (tmp_path / "other").mkdir()
    cure = "give the folder that a run has as log.dir"
    for name, message in (
        ("shakespere", f"run {tmp_path}/shakespere does not exist: did you mean {tmp_path}/shakespeare?"),
        ("moe", f"run {tmp_path}/moe does not exist: {cure}"),
        ("other", f"{tmp_path}/other is not a run (no metrics.jsonl in it): {cure}"),
    ):
        with pytest.raises(MetricsError) as error:
            read_metrics(tmp_path / name)
        assert str(error.value) == message


def test_log_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(MetricsError) as error, open_log(tmp_path / "taken"):
        pass
    assert str(error.value) == (
        f"log.dir={tmp_path}/taken cannot be created (File exists): name a folder that can be written"
    )


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"


def test_tensorboard_gets_the_scalars_of_a_resumed_run(tmp_path: Path) -> None:
    with open_log(tmp_path, tensorboard=True) as log:
        log.write(RECORD)
        log.write({"step": 130, "loss": float("nan"), "step_s": 0.1})
    with open_log(tmp_path, start_step=120, tensorboard=True) as log:
        log.write({"step": 130, "validation_loss": 1.5})
    first, second = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.suffix == ".from120")
    scalars = {key: value for key, value in RECORD.items() if key not in ("step", "expert_load")}
    assert read_scalars(first) == {(key, 120): pytest.approx(value) for key, value in scalars.items()} | {
        ("step_s", 130): pytest.approx(0.1)
    }
    assert read_scalars(second) == {("validation_loss", 130): pytest.approx(1.5)}


@pytest.mark.parametrize("trouble", ["full disk", "clock set back"])
def test_tensorboard_never_holds_a_run(trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many records as once filled the queue of a thread that had ended; none of their numbers is lost."""
    with open_log(tmp_path, tensorboard=True) as log:
        log.write({"step": 1, "rate": 0.5})
        if trouble == "full disk":
            disk = on_a_full_disk(log._scalars.file)
        else:
            monkeypatch.setattr(time, "time", lambda: 1000.0)
        for step in range(2, 40):
            log.write({"step": step, "rate": 0.5})
        if trouble == "full disk":
            disk.room = 10**6
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert read_scalars(path) == {("rate", step): 0.5 for step in range(1, 40)}
    reported = [record["alarm"] for record in read_metrics(tmp_path) if "alarm" in record]
    wanted = f"{path} does not fit on the disk, and its last lines wait in memory: free some space"
    assert reported == ([wanted] if trouble == "full disk" else [])


def test_the_files_of_a_resumed_run_are_in_order_though_its_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads them by name."""
    for start_step in (0, 10, 20):
        with open_log(tmp_path, start_step, tensorboard=True):
            monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert [path.suffix for path in sorted((tmp_path / "tensorboard").iterdir())] == [".from0", ".from10", ".from20"]


def test_metrics_deleted_meanwhile_are_put_back_and_that_is_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(tmp_path) as log:
        log.write({"step": 1, "rate": 0.5})
        (tmp_path / "metrics.jsonl").unlink()
        log.write({"step": 2, "rate": 0.5})
    text = f"{tmp_path}/metrics.jsonl was deleted while the run writes it: it is created again"
    assert capsys.readouterr().out == f"warning: {text}\n"
    assert [(record["step"], record.get("alarm")) for record in read_metrics(tmp_path)] == [
        (1, None),
        (2, None),
        (2, text),
    ]


def read_scalars(path: Path) -> dict[tuple[str, int], float]:
    """Tag and step → value of a TensorBoard event file: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, found, at = path.read_bytes(), {}, 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += 16 + length
    return found
