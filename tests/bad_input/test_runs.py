"""Runs that cannot be written, resumed or restored: their folders, checkpoints, configs and records."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from moe_jax.checkpoint.record import Record, read_record
from moe_jax.checkpoint.storage import DiskStorage
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import run_command
from moe_jax.run.restore import restore_latest
from moe_jax.run.setup import open_run
from tests.bad_input.cases import COMMANDS, Damage, Refusal, cases, remove, tree, write


@pytest.mark.parametrize(
    ("log_dir", "reason"),
    [
        ("file", "created (file is a file)"),
        ("file/run", "created (file is a file)"),
        ("taken", "written (Is a directory)"),
    ],
)
def test_a_log_dir_that_cannot_be_written_stops_the_run(
    log_dir: str, reason: str, folder: Path, compiled_once: None, assert_refused: Refusal
) -> None:
    (folder / "taken" / "config.yaml").mkdir(parents=True)
    message = f"log.dir={log_dir} cannot be {reason}: name another folder"
    assert_refused(f"train --config tiny.yaml log.dir={log_dir}", message)


RESUMED = [
    (
        "another model",
        "model.num_layers=2",
        "model.num_layers=2, but the checkpoints in log.dir=run have model.num_layers=1: "
        "use model.num_layers=1, or another log.dir",
    ),
    (
        "another router",
        "model.moe.gate=sigmoid",
        "model.moe.gate=sigmoid, but the checkpoints in log.dir=run have model.moe.gate=softmax: "
        "use model.moe.gate=softmax, or another log.dir",
    ),
    (
        "fewer steps than it has",
        "train.steps=3",
        "train.steps=3, but log.dir=run has a checkpoint of step 4 already: "
        "use train.steps=4 or more, or another log.dir",
    ),
    (
        "without leave to resume",
        "checkpoint.resume=false",
        "log.dir=run holds checkpoints up to step 4 and checkpoint.resume=false would overwrite them: "
        "use another log.dir, or checkpoint.resume=true",
    ),
]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("words", "message"), cases(RESUMED))
def test_a_run_is_not_resumed_as_another(words: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(f"train --config tiny.yaml {words}", message)


def cut_index(run: Path) -> None:
    (index,) = (run / "checkpoints/4/state/d").iterdir()
    index.write_bytes(index.read_bytes()[:10])


def change_record(run: Path, record: Record | None = None) -> None:
    """Into another one, or one that its checksum does not fit."""
    file = run / "checkpoints/4/record/metadata"
    file.write_text(
        json.dumps(record.to_json()) if record else file.read_text().replace('"next_index": 4', '"next_index": 5')
    )


def change_numbers(run: Path) -> None:
    """As if a bit of the head had flipped: its digest is another one than that of the record."""
    record = read_record(DiskStorage(run), 4)
    head = record.leaves["params.head"]
    changed = dataclasses.replace(head, digest=(head.digest[0] ^ 1, head.digest[1]))
    change_record(run, dataclasses.replace(record, leaves={**record.leaves, "params.head": changed}))


def change_run(run: Path) -> None:
    """As if the checkpoint of another run had been put there, which has the same model."""
    change_record(run, dataclasses.replace(read_record(DiskStorage(run), 4), run="0123456789abcdef"))


# Which step is damaged, how it is reported and where the run continues. HASH: a name that the storage layer makes up.
DAMAGED = [
    ("no state", remove("checkpoints/4/state"), 4, "state/_METADATA is missing", 2),
    ("no record", remove("checkpoints/4/record"), 4, "record/metadata is missing", 2),
    ("no commit mark", remove("checkpoints/4/_CHECKPOINT_METADATA"), 4, "_CHECKPOINT_METADATA is missing", 2),
    ("no manifest", remove("checkpoints/4/state/manifest.ocdbt"), 4, "state/manifest.ocdbt is missing", 2),
    ("no values", remove("checkpoints/4/state/ocdbt.process_0"), 4, "state/ocdbt.process_0/d/HASH is missing", 2),
    ("an index cut short", cut_index, 4, "state/d/HASH has 10 of NUMBER bytes", 2),
    (
        "a cut record",
        write("checkpoints/4/record/metadata", '{"crc32'),
        4,
        "record/metadata: Unterminated string starting at: line 1 column 2 (char 1)",
        2,
    ),
    ("another record", change_record, 4, "record/metadata: its checksum is another", 2),
    ("other numbers", change_numbers, 4, "params.head is not what was saved: its digest differs", 2),
    ("another run", change_run, 4, "it is of another run, 0123456789abcdef, and provenance.json has ID", 2),
    ("an empty folder", lambda run: (run / "checkpoints/9").mkdir(), 9, "_CHECKPOINT_METADATA is missing", 4),
    (
        "another step",
        lambda run: (run / "checkpoints/2").rename(run / "checkpoints/7"),
        7,
        "it holds step 2",
        4,
    ),
]


@pytest.mark.parametrize(("damage", "step", "reason", "resumed_at"), cases(DAMAGED))
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_resumes(
    damage: Damage, step: int, reason: str, resumed_at: int, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    kept = tree(run / "checkpoints" / str(step))
    config = load_config("tiny.yaml", ["train.steps=8"])
    _, restored = restore_latest(config, open_run(config))
    assert restored is not None
    assert restored.record.step == restored.state["step"] == restored.record.data["next_index"] == resumed_at
    pattern = re.escape(reason).replace("HASH", "[0-9a-f]{32}").replace("NUMBER", r"\d+").replace("ID", "[0-9a-f]{16}")
    there = f"run/checkpoints/quarantine/{step}"
    line = rf"warning: checkpoint run/checkpoints/{step} is damaged \(({pattern})\): moved to {there}, "
    output = capfd.readouterr()
    reported = re.fullmatch(rf"{line}resuming from step {resumed_at}\n", output.out)
    assert reported
    assert output.err == ""
    moved = tree(Path(there))
    assert moved.pop("reason.txt") == f"{reported[1]}\n".encode()
    assert moved == kept


def test_samples_are_of_the_newest_whole_checkpoint_and_nothing_is_moved(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change_numbers(run)
    before = tree(run)
    monkeypatch.setattr(sys, "argv", ["generate", "--run", "run", "--tokens", "1"])
    run_command(COMMANDS["generate"])
    reason = "params.head is not what was saved: its digest differs"
    warning = f"warning: checkpoint run/checkpoints/4 is damaged ({reason}); using step 2\n"
    output = capfd.readouterr().err.splitlines(keepends=True)
    assert output[0] == warning
    assert len(output) == 2, "and how fast it was"
    assert tree(run) == before


@pytest.mark.parametrize("line", ["train --config tiny.yaml train.steps=6", "generate --run run"])
def test_where_no_checkpoint_is_whole_none_is_moved(line: str, run: Path, assert_refused: Refusal) -> None:
    """The disk may be at fault, and nobody wants to begin again unasked."""
    remove("checkpoints/2/state/_METADATA")(run)
    change_numbers(run)
    reasons = "4: params.head is not what was saved: its digest differs; 2: state/_METADATA is missing"
    assert_refused(
        line,
        f"no checkpoint in run/checkpoints is whole ({reasons}): use another log.dir, or move them away to start again",
    )


def test_a_checkpoint_with_another_seed_is_refused_by_name(run: Path, assert_refused: Refusal) -> None:
    """One of an older version, which does not name its run."""
    record = read_record(DiskStorage(run), 4)
    train = {**record.config["train"], "seed": 1}
    change_record(run, dataclasses.replace(record, config=record.config | {"train": train}, run=None))
    assert_refused(
        "train --config tiny.yaml train.steps=6",
        "train.seed=0, but the checkpoints in log.dir=run have train.seed=1: use train.seed=1, or another log.dir",
    )


OTHER_TEXT = (
    "data.path={} has other tokens to {} on than those of the checkpoint of step 4 in log.dir=run: give it the text "
    "that the run began with (and its data.validation_fraction), or use another log.dir"
)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("path", "words", "part"),
    [
        ("text.txt", "", "train"),  # another one of this name
        ("middle.txt", "", "train"),
        ("text.txt", "data.validation_fraction=0.2", "train"),
    ],
)
def test_other_text_is_refused(path: str, words: str, part: str, folder: Path, assert_refused: Refusal) -> None:
    if path == "middle.txt":
        (folder / "middle.txt").write_text("m" * 3000)
    elif not words:
        (folder / "text.txt").write_text((folder / "text.txt").read_text().replace("fox", "cat", 1))
    assert_refused(f"train --config tiny.yaml train.steps=6 data.path={path} {words}", OTHER_TEXT.format(path, part))


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("place", ["./text.txt", "link.txt", "copy/other_name.txt", "absolute"])
def test_the_same_text_by_another_name_resumes(place: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "link.txt").symlink_to(folder / "text.txt")
    (folder / "copy").mkdir()
    shutil.copy(folder / "text.txt", folder / "copy" / "other_name.txt")
    path = str(folder / "text.txt") if place == "absolute" else place
    config = load_config("tiny.yaml", ["train.steps=8", f"data.path={path}"])
    _, restored = restore_latest(config, open_run(config))
    assert restored is not None
    assert restored.record.step == 4
    assert capfd.readouterr().out == ""


def test_a_checkpoint_without_a_checksum_of_its_text_resumes_with_a_warning(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change_record(run, dataclasses.replace(read_record(DiskStorage(run), 4), text=None, run=None))
    config = load_config("tiny.yaml", ["train.steps=8"])
    _, restored = restore_latest(config, open_run(config))
    assert restored is not None
    assert capfd.readouterr().out == (
        "warning: the checkpoint of step 4 in log.dir=run has no checksum of its data, as of an older version: whether "
        "data.path=text.txt still has the tokens that it was trained on is not known\n"
    )


def test_a_checkpoint_without_a_checksum_of_its_text_is_evaluated_with_a_warning(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change_record(run, dataclasses.replace(read_record(DiskStorage(run), 4), text=None, run=None))
    monkeypatch.setattr(sys, "argv", ["evaluate", "run"])
    run_command(COMMANDS["evaluate"])
    output = capfd.readouterr()
    assert output.err.startswith("warning: the checkpoint of step 4 in log.dir=run has no checksum of its data")
    assert "run, step 4: parameters\n" in output.out


def test_a_run_keeps_its_number_and_another_one_in_its_place_gets_a_new_one(run: Path, folder: Path) -> None:
    number = read_record(DiskStorage(run), 4).run
    assert number == json.loads((run / "provenance.json").read_text())["run"]
    config = load_config("tiny.yaml", ["train.steps=8"])
    assert open_run(config).identity.run == number
    remove("provenance.json")(run)
    assert open_run(config).identity.run == number
    remove("checkpoints")(run)
    assert open_run(config).identity.run != number


def test_a_checkpoint_of_another_model_is_refused_and_stays(run: Path, assert_refused: Refusal) -> None:
    """Though the run's own config is that of this one."""
    record = read_record(DiskStorage(run), 4)
    model = {**record.config["model"], "num_layers": 2}
    change_record(run, dataclasses.replace(record, config=record.config | {"model": model}))
    assert_refused(
        "train --config tiny.yaml train.steps=6",
        "model.num_layers=1, but the checkpoints in log.dir=run have model.num_layers=2: "
        "use model.num_layers=2, or another log.dir",
    )


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("config", ["copy", "copy/config.yaml"])
def test_a_copy_of_a_run_does_not_train_in_the_original_unasked(config: str, assert_refused: Refusal) -> None:
    shutil.copytree("run", "copy")
    assert_refused(
        f"train --config {config} train.steps=6",
        "log.dir=run in copy/config.yaml is not the folder of this config, as in a run that was copied or moved: give "
        "log.dir=copy to train here, or log.dir=run to train there",
    )


def test_a_copy_of_a_run_trains_in_its_own_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(run, "copy")
    original = tree(run)
    monkeypatch.setattr(sys, "argv", ["train", "--config", "copy", "train.steps=6", "log.dir=copy"])
    run_command(COMMANDS["train"])
    assert (Path("copy") / "checkpoints" / "6").is_dir()
    assert tree(run) == original


@pytest.mark.parametrize("config", ["run/config.yaml", "link"])
def test_a_run_resumes_from_its_own_folder(config: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("link").symlink_to(run)
    monkeypatch.setattr(sys, "argv", f"train --config {config} train.steps=6".split())
    run_command(COMMANDS["train"])
    assert (run / "checkpoints" / "6").is_dir()


LOST_CONFIG = [
    (
        "missing",
        remove("config.yaml"),
        "config file run/config.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "empty",
        write("config.yaml", ""),
        "config file run/config.yaml is empty: put the run's own there again, or name another file or folder",
    ),
    (
        "cut short",
        write("config.yaml", "model: {"),
        "run/config.yaml: expected the node content, but found '<stream end>' at line 1, column 9",
    ),
    (
        "of another version",
        write("config.yaml", "train: {step: 1}"),
        "unknown setting train.step: did you mean train.steps?",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), cases(LOST_CONFIG))
def test_a_run_whose_config_is_lost_is_neither_resumed_nor_sampled(
    damage: Damage, reason: str, run: Path, assert_refused: Refusal
) -> None:
    damage(run)
    assert_refused("generate --run run", reason)
    assert_refused("evaluate run", reason)
    resumed = f"log.dir=run has checkpoints, but not the config of their model ({reason}): use another log.dir"
    assert_refused("train --config tiny.yaml", resumed)


def test_a_file_in_the_place_of_the_checkpoints_is_no_new_run(run: Path, assert_refused: Refusal) -> None:
    remove("checkpoints")(run)
    write("checkpoints", "")(run)
    for line in ("train --config tiny.yaml", "generate --run run", "evaluate run"):
        assert_refused(line, "run/checkpoints is not a folder: remove it, or use another log.dir")


def test_damaged_records_stop_a_resume_and_a_report(run: Path, assert_refused: Refusal) -> None:
    records = run / "metrics.jsonl"
    records.write_text("\0\0\0\n" + records.read_text())
    reason = "it is not JSON: Expecting value: line 1 column 1 (char 0)"
    for line in ("report run", "train --config tiny.yaml train.steps=6"):
        assert_refused(line, f"run/metrics.jsonl line 1 is not a record of metrics ({reason}): delete the line")


def test_the_run_of_these_cases_can_be_resumed_and_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the cases above might be refused for a reason of their own."""
    for line in ("train --config tiny.yaml train.steps=6", "report run"):
        name, *arguments = line.split()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        run_command(COMMANDS[name])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 4, 6]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "6"]
