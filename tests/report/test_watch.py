"""The page of a run that still trains is written until its last step, or somebody stops that."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_jax.config import Config, TrainConfig
from moe_jax.config.yaml_io import to_yaml
from moe_jax.errors import UserError
from moe_jax.report.page import watch
from moe_jax.telemetry.run_log import FILE_NAME

REFRESH = '<meta http-equiv="refresh" content="7">'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One that is to train for four steps and has just begun."""
    (tmp_path / "config.yaml").write_text(to_yaml(Config(train=TrainConfig(steps=4))))
    (tmp_path / FILE_NAME).write_text("")
    return tmp_path


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[None]], list[float]]:
    """Does one thing after another while the watch sleeps; what is returned fills with how long it slept."""

    def do(things: Iterator[None]) -> list[float]:
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            next(things)

        monkeypatch.setattr(time, "sleep", sleep)
        return slept

    return do


def add(run: Path, **record: float) -> None:
    with (run / FILE_NAME).open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_the_page_follows_a_run_to_its_end(run, meanwhile, capsys) -> None:
    page = run / "report.html"

    def things() -> Iterator[None]:
        assert not page.exists(), "there is nothing to show"
        add(run, step=2, loss=2.5)
        yield
        assert REFRESH in page.read_text()
        assert "up to step 2;" in page.read_text()
        add(run, step=4, loss=2.25)
        yield
        assert REFRESH in page.read_text(), "the run has still to validate"
        add(run, step=4, validation_loss=2.75)
        yield

    slept = meanwhile(things())
    watch(run, 7)
    assert slept == [7, 7, 7]
    assert "http-equiv" not in page.read_text()
    assert "2.750" in page.read_text()
    reported = f"renewing {page} every 7 s until the last step; Ctrl-C stops"
    assert capsys.readouterr().out == f"{reported}\nwrote {page}\n"


def test_ctrl_c_ends_the_watch_and_leaves_a_page_that_stays(run, meanwhile) -> None:
    def things() -> Iterator[None]:
        add(run, step=2, loss=2.5)
        yield
        assert REFRESH in (run / "report.html").read_text()
        raise KeyboardInterrupt

    meanwhile(things())
    watch(run, 7)
    assert "http-equiv" not in (run / "report.html").read_text()


def test_a_run_that_has_ended_is_reported_on_once(run, meanwhile) -> None:
    slept = meanwhile(iter(()))
    add(run, step=4, validation_loss=2.75)
    watch(run, 7)
    assert slept == []
    assert (run / "report.html").exists()


def test_what_is_no_run_is_not_watched(tmp_path: Path, meanwhile) -> None:
    meanwhile(iter(()))
    with pytest.raises(UserError, match=r"is not a run \(no metrics.jsonl in it\)"):
        watch(tmp_path, 7)
