"""The times of a job for ml-goodput-measurement, with a stand-in for its package."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_jax.errors import ConfigError
from moe_jax.run import loop
from moe_jax.telemetry.goodput import Goodput, GoodputError, check_goodput
from tests.run.test_evaluation import SETTINGS
from tests.run.whole_runs import config_of

START = ["job_start_time", "training_preparation_start_time", "training_preparation_end_time"]
BEGUN = datetime(2026, 1, 2, tzinfo=UTC)


class Recorder:
    """The package's recorder: remembers what it gets."""

    entries: list[tuple[Any, ...]]

    def __init__(self, job: str, logger: str, logging_enabled: bool) -> None:
        type(self).entries = [(job, logger, logging_enabled)]

    def __getattr__(self, name: str) -> Any:  # record_…
        return lambda *values: self.entries.append((name.removeprefix("record_"), *values))


def refuse(*_: Any, **__: Any) -> None:
    raise LookupError("Your default credentials were not found.\nTo set up …")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    package = SimpleNamespace(__spec__="found", goodput=SimpleNamespace(GoodputRecorder=Recorder))
    monkeypatch.setitem(sys.modules, "ml_goodput_measurement", package)
    return Recorder


def test_entries_are_those_from_which_goodput_is_computed(recorder: type[Recorder]) -> None:
    goodput = Goodput("moe", BEGUN)
    with goodput.until_end(pytest.fail):
        goodput.step(7)
        goodput.step(8)
    assert recorder.entries == [
        ("moe", "goodput_moe", True),
        ("job_start_time", BEGUN),
        ("training_preparation_start_time", BEGUN),
        ("training_preparation_end_time",),
        ("step_start_time", 7),
        ("step_start_time", 8),
        ("job_end_time",),
    ]


def test_a_run_records_each_of_its_steps(recorder: type[Recorder], tmp_path: Path) -> None:
    loop.train(config_of(tmp_path / "run", SETTINGS, "train.steps=2", "log.goodput_job=moe"))
    assert [entry[0] for entry in recorder.entries] == ["moe", *START, *2 * ["step_start_time"], "job_end_time"]
    loop.train(config_of(tmp_path / "run", SETTINGS, "train.steps=4", "log.goodput_job=moe"))
    assert [step for name, *step in recorder.entries if name == "step_start_time"] == [[3], [4]]


def test_a_run_without_credentials_writes_nothing(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorder, "__init__", refuse)
    with pytest.raises(GoodputError):
        loop.train(config_of(tmp_path / "run", SETTINGS, "train.steps=2", "log.goodput_job=moe"))
    assert not (tmp_path / "run/config.yaml").exists()


def test_without_a_job_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_goodput_measurement", None)
    goodput = Goodput(None, BEGUN)
    with goodput.until_end(pytest.fail):
        goodput.step(1)


def test_a_missing_package_is_reported_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_goodput_measurement", None)
    check_goodput(None)
    with pytest.raises(ConfigError) as refusal:
        check_goodput("moe")
    assert str(refusal.value) == (
        "log.goodput_job=moe needs the package ml-goodput-measurement, which is not installed: "
        "pip install -e '.[goodput]', or log.goodput_job=null"
    )


def test_missing_credentials_are_one_line(recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "__init__", refuse)
    with pytest.raises(GoodputError) as refusal:
        Goodput("moe", BEGUN)
    assert str(refusal.value) == (
        "log.goodput_job=moe cannot begin (LookupError: Your default credentials were not found. To set up …): "
        "run gcloud auth application-default login, or log.goodput_job=null"
    )


def test_a_log_that_fails_ends_no_run(recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(recorder, "record_step_start_time", fail, raising=False)
    warnings: list[str] = []
    goodput = Goodput("moe", BEGUN)
    with goodput.until_end(warnings.append):
        goodput.step(1)
        goodput.step(2)
    assert warnings == ["the log of goodput takes nothing any more (ConnectionError: gone)"]
