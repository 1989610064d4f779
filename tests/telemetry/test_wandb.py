"""Numbers of a run at Weights & Biases, with a stand-in for its package."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moe_jax.errors import ConfigError
from moe_jax.telemetry.run_log import RunLog
from moe_jax.telemetry.wandb import WandbError, check_wandb


class Wandb(SimpleNamespace):
    """The package: remembers how runs began, what they got and how they ended."""

    Settings = staticmethod(dict)

    def __init__(self) -> None:
        super().__init__(begun=[], logged=[], ended=[])

    def init(self, **settings: Any) -> Any:
        self.begun.append(settings)
        return SimpleNamespace(id=settings["id"] or "new", log=self.log, finish=self.finish)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def log_in(folder, quiet: bool = False) -> RunLog:
    return RunLog(folder, 0, 9, 8, tensorboard=False, quiet=quiet, wandb_project="moe", config={"model": {"d": 4}})


RECORD = {"step": 1, "loss": 2.0, "grad_norm": float("nan"), "expert_load": [0.5, 0.5], "step_s": 0.1}


def test_a_run_gets_finite_scalars_and_resumes_as_the_same_run(wandb, tmp_path):
    with log_in(tmp_path / "run") as log:
        log.write(RECORD)
    with pytest.raises(KeyboardInterrupt), log_in(tmp_path / "run"):
        raise KeyboardInterrupt
    assert wandb.logged == [(1, {"loss": 2.0, "step_s": 0.1})]
    assert [(begun["project"], begun["name"], begun["id"]) for begun in wandb.begun] == [
        ("moe", "run", None),
        ("moe", "run", "new"),
    ]
    assert wandb.begun[0]["config"] == {"model": {"d": 4}}
    assert wandb.ended == [0, 1]


def test_only_the_main_process_logs(wandb, tmp_path):
    with log_in(tmp_path, quiet=True) as log:
        log.write(RECORD)
    assert not wandb.begun


def test_a_login_that_fails_is_one_line(wandb, tmp_path, monkeypatch):
    def refuse(**_: Any) -> None:
        raise ValueError("api_key not configured (no-tty).\ncall wandb.login")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(WandbError) as refusal:
        log_in(tmp_path).__enter__()
    assert str(refusal.value) == (
        "log.wandb_project=moe cannot begin (ValueError: api_key not configured (no-tty). call wandb.login): "
        "run wandb login, or set WANDB_MODE=offline, or log.wandb_project=null"
    )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_logger_that_fails_ends_no_run(wandb, tmp_path, monkeypatch, capsys):
    def fail(numbers: dict[str, float], step: int) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(wandb, "log", fail)
    with log_in(tmp_path) as log:
        log.write(RECORD)
        log.write(RECORD | {"step": 2})
    assert capsys.readouterr().out.count("warning: wandb takes nothing any more (ConnectionError: gone)\n") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_package_is_reported_before_anything_is_done(monkeypatch):
    check_wandb(None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as refusal:
        check_wandb("moe")
    assert str(refusal.value) == (
        "log.wandb_project=moe needs the package wandb, which is not installed: pip install -e '.[wandb]', or "
        "log.wandb_project=null"
    )


def test_an_end_that_fails_ends_no_run(wandb, tmp_path, monkeypatch, capsys):
    def fail(exit_code: int) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(wandb, "finish", fail)
    with log_in(tmp_path) as log:
        log.write(RECORD)
    assert "warning: wandb may lack what came last (TimeoutError: no answer)\n" in capsys.readouterr().out


def test_it_ends_where_records_cannot_begin(wandb, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        log_in(tmp_path).__enter__()
    assert wandb.ended == [1]
