"""Evaluations of a trained run that are refused, or that report what they do not read."""

import json
import sys
from pathlib import Path

import pytest

from moe_jax.errors import run_command
from tests.bad_input.cases import COMMANDS, Refusal, cases, remove

REFUSED = [
    ("a step that was not saved", "--step 3", "run run has no checkpoint of step 3: name one of 2, 4"),
    (
        "no average",
        "--ema",
        "--ema: run run has optimizer.ema_decay=null, so no average: leave out --ema",
    ),
    ("a missing text", "--data txet.txt", "--data=txet.txt does not exist: did you mean text.txt?"),
    (
        "a page",
        "--data page.html",
        "--data=page.html is no folder, .txt, .jsonl, .parquet or .array_record file: prepare it with "
        "scripts/prepare_text.py",
    ),
    (
        "a folder of something else",
        "--data full",
        "--data=full has no meta.json: make a folder from its text with scripts/prepare_text.py",
    ),
    ("an empty text", "--data empty.txt", "--data=empty.txt has 0 tokens, too few to predict one: give more text"),
    ("text that is not UTF-8", "--data latin1.txt", "latin1.txt is not UTF-8 text: convert it, e.g. with iconv"),
    (
        "broken lines",
        "--data broken.jsonl",
        "broken.jsonl, line 2 is not JSON (Expecting value: line 2 column 1 (char 10)): repair or remove it",
    ),
    (
        "two texts of one name",
        "--data text.txt --data ./text.txt",
        "--data names two texts text.txt, which would share one result: evaluate one at a time",
    ),
    (
        "tokens of another tokenizer",
        "--data bpe",
        "--data=bpe has tokens of its own tokenizer.json, and run run was trained on bytes: name a text that was "
        "prepared with the run's",
    ),
    (
        "another model",
        "model.hidden_size=32",
        "model.hidden_size=32, but the checkpoints in log.dir=run have model.hidden_size=16: use model.hidden_size=16, "
        "or another log.dir",
    ),
    (
        "tasks without lm-eval",
        "--tasks arc_easy",
        "--tasks=arc_easy needs lm-eval, and lm_eval is not installed: pip install -e '.[eval]'",
    ),
    ("a limit of no task", "--limit 3", "--limit=3 is for tasks: name some with --tasks, or drop it"),
    ("a chat of no task", "--chat", "--chat is for tasks: name some with --tasks, or drop it"),
    (
        "a chat without a template",
        "--tasks arc_easy --chat",
        "run has no chat_template.jinja, and no chat_template in a tokenizer_config.json: put the model's there, or "
        "leave out --chat",
    ),
    ("results over a text", "--json text.txt", "--json=text.txt must be a file that ends in .json, e.g. loss.json"),
    ("a file in the way", "--json file/found.json", "file: Not a directory: name another file or folder"),
]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("words", "message"), cases(REFUSED))
def test_an_evaluation_that_cannot_be_is_refused(words: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(f"evaluate run {words}", message)


def test_a_damaged_checkpoint_that_was_asked_for_is_reported(run: Path, assert_refused: Refusal) -> None:
    remove("checkpoints/4/record")(run)
    assert_refused(
        "evaluate run --step 4",
        "checkpoint run/checkpoints/4 is damaged (record/metadata is missing): name another step",
    )


OTHER_TEXT = (
    "data.path={} has other tokens to validate on than those of the checkpoint of step 4 in log.dir=run: give it the "
    "text that the run began with (and its data.validation_fraction), or evaluate it with --data"
)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("", "text.txt"),  # another one of this name
        ("data.path=other.txt", "other.txt"),
        ("data.validation_fraction=0.2", "text.txt"),
    ],
)
def test_another_text_is_not_evaluated_as_the_run_s_own(
    words: str, path: str, folder: Path, assert_refused: Refusal
) -> None:
    text = (folder / "text.txt").read_text()
    if "fraction" not in words:
        (folder / path).write_text(text.replace("fox", "cat"))
    assert_refused(f"evaluate run {words}", OTHER_TEXT.format(path))


@pytest.mark.usefixtures("run")
def test_texts_of_another_number_are_not_evaluated_as_the_run_s_own(assert_refused: Refusal) -> None:
    assert_refused(
        "evaluate run data.path=null 'data.sources=[{path: text.txt, weight: 1}, {path: middle.txt, weight: 1}]'",
        "data.sources names 2 texts, and run run was trained on 1: leave it out, or name other texts with --data",
    )


def test_the_same_validation_text_by_another_name_is_evaluated(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the text to train on is another one now. Settings that are not read are reported."""
    text = Path("text.txt").read_text()
    Path("other.txt").write_text(text.replace("fox", "cat", 1))
    words = ["data.path=other.txt", "train.steps=99", "log.dir=nowhere"]
    losses = []
    for overrides in ([], words):
        monkeypatch.setattr(sys, "argv", ["evaluate", "run", *overrides])
        run_command(COMMANDS["evaluate"])
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["evaluation/validation/loss"] for record in records if "evaluation_options" in record])
        printed = capsys.readouterr().out
        reported = "unused: train.steps, log.dir, as an evaluation does not read them\n"
        assert printed.count(reported) == (overrides is words)
    assert losses[1][-1] == losses[0][0]
    assert not Path("nowhere").exists()
