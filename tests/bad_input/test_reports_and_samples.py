"""Runs that cannot be reported on or sampled."""

import sys
from pathlib import Path

import pytest

from tests.bad_input.cases import COMMANDS, Damage, Refusal, cases, remove, write

NO_RUNS = [
    (
        "generate: a missing run",
        "generate --run runn",
        "config file runn does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "generate: a config is no run",
        "generate --run tiny.yaml",
        "run tiny.yaml has no checkpoint: train it first, or name another run folder",
    ),
    ("generate: no tokens", "generate --run full --tokens 0", "--tokens=0 must be at least 1"),
    ("generate: no probability", "generate --run full --top-p 0", "--top-p=0.0 must be above 0"),
    ("generate: no token to draw from", "generate --run full --top-k 0", "--top-k=0 must be at least 1"),
    ("generate: a share above 1", "generate --run full --min-p 2", "--min-p=2.0 must be at most 1"),
    ("generate: no prompts at a time", "generate --run full --batch-size 0", "--batch-size=0 must be at least 1"),
    ("generate: an empty stop", "generate --run full --stop=", "--stop= is empty: name a text, or leave it out"),
    (
        "generate: a system message without a chat",
        "generate --run full --system brief",
        "--system=brief is for a chat: use --chat, or leave it out",
    ),
    (
        "generate: a negative temperature",
        "generate --run full --temperature -1",
        "--temperature=-1.0 must be at least 0",
    ),
    (
        "evaluate: a missing run",
        "evaluate runn",
        "run runn does not exist: name the folder of a run (log.dir)",
    ),
    (
        "evaluate: a config is no run",
        "evaluate tiny.yaml",
        "run tiny.yaml is a file: name the folder of a run (log.dir)",
    ),
    ("evaluate: no batches", "evaluate full --batches 0", "--batches=0 must be at least 1"),
    ("evaluate: a step before the first one", "evaluate full --step=-1", "--step=-1 must be at least 0"),
    (
        "report: nothing named",
        "report",
        "nothing to report on: name the folder of a run, or --compile TARGET --config FILE",
    ),
    ("report: a missing run", "report runn", "run runn does not exist: give the folder that a run has as log.dir"),
    (
        "report: a folder of something else",
        "report full",
        "full is not a run (no metrics.jsonl in it): give the folder that a run has as log.dir",
    ),
    ("report: no seconds", "report runn --watch 0", "--watch=0 must be at least 1"),
    (
        "report: a missing run to watch",
        "report runn --watch 5",
        "run runn does not exist: give the folder that a run has as log.dir",
    ),
    (
        "report: a folder for a page",
        "report full --out out",
        "--out out goes with --compile TARGET --config FILE: name both",
    ),
    (
        "report: policies of a page",
        "report full --policies vanilla",
        "--policies vanilla goes with --compile TARGET --config FILE: name both",
    ),
    (
        "report: an option of a page",
        "report full --option a=1",
        "--option a=1 goes with --compile TARGET --config FILE: name both",
    ),
    (
        "report: nothing that continues",
        "report --compile cpu:8 --config tiny.yaml --watch 5",
        "--watch=5 is for the page of a run, and --compile writes none: drop one",
    ),
]


@pytest.mark.parametrize(("line", "message"), cases(NO_RUNS))
def test_what_is_no_run_is_neither_sampled_nor_reported(line: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(line, message)


SCHEDULED = "report --compile cpu:8 --config tiny.yaml schedule.policy=unified"
WANTED = "name the folder that log.trace_step filled, e.g. RUN/trace/0"

TRACES = [
    ("for nothing", f"{SCHEDULED} --save-hlo file", "file: Not a directory: name another file or folder"),
    ("alone", "report --trace full", "--trace full goes with --compile TARGET --config FILE: name both"),
    ("missing", f"{SCHEDULED} --trace runn", f"--trace runn is no folder: {WANTED}"),
    ("something else", f"{SCHEDULED} --trace full", f"--trace full has no step.hlo: {WANTED}"),
    (
        "of a whole run",
        f"{SCHEDULED} --trace run_traced",
        "--trace run_traced has no step.hlo: did you mean run_traced/trace/0?",
    ),
    (
        "a program alone",
        f"{SCHEDULED} --trace untraced",
        "--trace untraced has no *.trace.json.gz in it: let log.trace_step fill it again",
    ),
    (
        "another program",
        f"{SCHEDULED} --trace other_program",
        "--trace other_program: its trace holds nothing of step.hlo: let log.trace_step fill it again",
    ),
    (
        "no program",
        f"{SCHEDULED} --trace no_hlo",
        "no_hlo/step.hlo is not scheduled HLO: let log.trace_step write it again",
    ),
    (
        "a program cut short",
        f"{SCHEDULED} --trace cut_hlo",
        "cut_hlo/step.hlo is not scheduled HLO: let log.trace_step write it again",
    ),
    (
        "no events",
        f"{SCHEDULED} --trace odd_trace",
        "odd_trace/vm.trace.json.gz is no trace of jax.profiler ('int' object is not iterable): "
        "trace the program again",
    ),
    (
        "cut short",
        f"{SCHEDULED} --trace cut_trace",
        "cut_trace/vm.trace.json.gz is no trace of jax.profiler "
        "(Compressed file ended before the end-of-stream marker was reached): trace the program again",
    ),
    (
        "a plain step",
        f"{SCHEDULED} --trace run_traced/trace/0",
        "--trace is of a plain step, and --config tiny.yaml orders tasks (schedule.policy=unified): "
        "name the config of the run that was traced",
    ),
]


@pytest.mark.parametrize(("line", "message"), cases(TRACES))
def test_what_is_no_trace_of_a_scheduled_step_is_not_drawn(line: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(f"{line} --out out", message)


REPORTED = [
    (
        "no records yet",
        write("metrics.jsonl", ""),
        "run run has no records yet: wait until it has trained for log.every steps",
    ),
    (
        "provenance cut short",
        write("provenance.json", "{"),
        "run/provenance.json is not a JSON object: delete the file, the report does without it",
    ),
    (
        "a page that cannot be written",
        lambda run: (run / "report.html").mkdir(),
        "run/report.html cannot be written (Is a directory): make the folder writable",
    ),
]


@pytest.mark.parametrize(("damage", "message"), cases(REPORTED))
def test_a_run_that_cannot_be_reported_on(damage: Damage, message: str, run: Path, assert_refused: Refusal) -> None:
    damage(run)
    assert_refused("report run", message)


SAMPLED = [
    (
        "an empty prompt",
        "text.txt",
        "--prompt ''",
        "the prompt is empty: give at least one character, e.g. a line break",
    ),
    (
        "the text is gone, and with it the tokenizer",
        "gone/text.txt",
        "",
        "data.path=gone/text.txt does not exist: name a .txt, .jsonl, .parquet or .array_record file, or a "
        "prepared folder",
    ),
    (
        "the tokenizer is gone",
        "no_tokenizer",
        "",
        "no_tokenizer/tokenizer.json is no tokenizer (No such file or directory): make the folder again",
    ),
]


@pytest.mark.parametrize(("data", "words", "message"), cases(SAMPLED))
def test_a_run_that_cannot_be_sampled(data: str, words: str, message: str, run: Path, assert_refused: Refusal) -> None:
    saved = run / "config.yaml"
    saved.write_text(saved.read_text().replace("path: text.txt", f"path: {data}"))
    assert_refused(f"generate --run run {words}", message)


@pytest.mark.parametrize("now", ["moved.txt", "tokens"])
def test_a_run_is_sampled_though_its_text_has_moved(
    now: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").rename("moved.txt")
    monkeypatch.setattr(sys, "argv", f"generate --run run --prompt Moved --tokens 8 data.path={now}".split())
    COMMANDS["generate"]()
    assert capsys.readouterr().out.startswith("Moved")


def test_settings_that_a_sample_does_not_read_are_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "generate --run run --tokens 1 train.steps=99 log.dir=nowhere mesh.expert=1"
    monkeypatch.setattr(sys, "argv", line.split())
    COMMANDS["generate"]()
    assert "unused: train.steps, log.dir, as generation does not read them\n" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_a_run_without_a_checkpoint_has_nothing_to_sample(run: Path, assert_refused: Refusal) -> None:
    remove("checkpoints")(run)
    assert_refused("generate --run run", "run run has no checkpoint: train it first, or name another run folder")
