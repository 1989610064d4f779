"""What the command does once a run has trained: its report does not depend on its text sample."""

from pathlib import Path

import jax
import pytest

from moe_jax.cli import train as command
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError
from moe_jax.report.plots import PlotError


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written, in order."""
    found: list[str] = []

    def write_report(run: Path) -> Path:
        found.append("report")
        return run / "report.html"

    def write_sample(*_: object) -> str:
        found.append("sample")
        return "First Citizen"

    monkeypatch.setattr(command, "write_report", write_report)
    monkeypatch.setattr(command, "write_sample", write_sample)
    monkeypatch.setattr(command, "params_in_order", lambda state, stages: {})
    monkeypatch.setattr(command, "alarm_text", lambda run: "")
    return found


def write_results(run: Path) -> None:
    command._write_results(load_config(overrides=[f"log.dir={run}"]), {})


def test_the_page_is_written_before_the_sample_and_again_with_it(
    written: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path)
    assert written == ["report", "sample", "report"]
    assert capsys.readouterr().out == f"First Citizen\nreport: {tmp_path}/report.html\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore"), "RESOURCE_EXHAUSTED: out of memory"),
        (ConfigError("the tokenizer is gone: fetch it"), "the tokenizer is gone: fetch it"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_run_whose_sample_fails_has_succeeded(
    error: Exception,
    reason: str,
    written: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr(command, "write_sample", fail)
    write_results(tmp_path)
    assert written == ["report"]
    assert capsys.readouterr().out == (
        f"warning: no text is sampled ({reason}): do it by python -m moe_jax.generate\nreport: {tmp_path}/report.html\n"
    )


def test_a_run_without_a_page_has_succeeded(
    written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: Path) -> Path:
        raise PlotError("no plots: pip install")

    monkeypatch.setattr(command, "write_report", fail)
    write_results(tmp_path)
    assert capsys.readouterr().out == "First Citizen\nno report: no plots: pip install\n"
