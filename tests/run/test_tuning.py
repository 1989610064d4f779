"""Runs that change their step while they train: same losses, all processes at once, and what was found is kept."""

import dataclasses
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run import setup, tuning
from moe_jax.run.describe import describe
from moe_jax.run.loop import train
from moe_jax.run.setup import open_run
from moe_jax.telemetry.run_log import RunLog
from tests.run.test_resume import config_in, losses_of, started, wait_until
from tests.run.whole_runs import compiled_once

CHUNKED = ["schedule.policy=unified", "schedule.grad_reduce=bucketed", "checkpoint.every=0", "train.eval_every=0"]
CHUNKED += [
    "model.num_layers=1",
    "model.moe.moe_layer_freq=1",
    "model.moe.capacity_factor=1.25",
    "model.vocab_size=256",
]
pytestmark = pytest.mark.usefixtures("exact")  # whatever the chunks, losses are the same bit for bit
EIGHT = [*CHUNKED, "mesh.data=2", "mesh.expert=4", "train.batch_size=16", "schedule.bucket_cap_mb=0.02"]
TUNED = ["tune.over=[bucket_cap_mb]", "tune.samples=2", "tune.iterations=4", "tune.band=1e9", "train.steps=100000"]


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> Iterator[None]:
    """What a run begins with; what it tries is compiled again."""
    with compiled_once():
        yield


def records_of(folder: Path, prefix: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in records if f"{prefix}_step_s" in record]


@pytest.fixture
def stopped_when_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many steps a search takes is up to the compiler."""
    write = RunLog.write

    def write_and_stop(self: RunLog, record: dict[str, Any]) -> None:
        write(self, record)
        if "chosen_step_s" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunLog, "write", write_and_stop)


@pytest.mark.usefixtures("stopped_when_chosen")
def test_a_run_tunes_itself_without_another_loss_and_keeps_what_it_found(tmp_path, capsys):
    tuned, plain = tmp_path / "tuned", tmp_path / "plain"
    for folder in (tuned, plain):
        folder.mkdir()
    config = config_in(tuned, *EIGHT, *TUNED)
    train(config)
    tried, (chosen,) = records_of(tuned, "tried"), records_of(tuned, "chosen")
    assert tried[0]["tried_bucket_cap_mb"] == 0.02 != tried[1]["tried_bucket_cap_mb"]
    assert chosen["chosen_step_s"] == min(record["tried_step_s"] for record in tried)
    output = capsys.readouterr().out
    begun = re.search(r"(\d+ choices), beginning with schedule.bucket_cap_mb=0.02\n", output)
    assert begun
    assert output.count("per step (sample ") == 2
    assert (
        output.count(f"compiling schedule.bucket_cap_mb={tried[1]['tried_bucket_cap_mb']} while training continues\n")
        == 1
    )
    assert "search not finished" not in output
    assert f"continuing with schedule.bucket_cap_mb={chosen['chosen_bucket_cap_mb']}, " in output

    losses = losses_of(tuned)
    assert tried[0]["step"] < tried[1]["step"] <= max(losses)
    train(config_in(plain, *EIGHT, f"train.steps={max(losses)}"))
    assert losses == losses_of(plain), "whatever the chunks, bit for bit"

    assert load_config(tuned).schedule.bucket_cap_mb == chosen["chosen_bucket_cap_mb"]
    resumed = open_run(config)
    assert resumed.first_step == max(losses)
    assert resumed.config.schedule.bucket_cap_mb == chosen["chosen_bucket_cap_mb"]
    assert describe(resumed)["tuning"].startswith(
        f"{begun[1]}, beginning with schedule.bucket_cap_mb={chosen['chosen_bucket_cap_mb']}, found before "
        f"({tuned}/tuned.json): "
    )


@pytest.mark.usefixtures("stopped_when_chosen")
def test_a_choice_that_cannot_be_compiled_is_reported_and_left_out(tmp_path, monkeypatch, capsys):
    class Broken:
        def lower(self, *_: object) -> None:
            raise RuntimeError("out of memory\nand much more")

    make_trainer = tuning.make_trainer
    monkeypatch.setattr(tuning, "make_trainer", lambda *given: dataclasses.replace(make_trainer(*given), step=Broken()))
    train(config_in(tmp_path, *EIGHT, *TUNED))
    assert capsys.readouterr().out.count(" cannot be compiled, out of memory\n") == 1
    assert [record["tried_bucket_cap_mb"] for record in records_of(tmp_path, "tried")] == [0.02]
    assert [record["chosen_bucket_cap_mb"] for record in records_of(tmp_path, "chosen")] == [0.02]


def test_a_run_that_ends_before_its_search_reports_it_and_the_next_one_resumes_it(tmp_path, capsys):
    train(config_in(tmp_path, *EIGHT, *TUNED[:-1], "train.steps=9"))
    unfinished = (
        "search not finished: 1 of 2 samples, so nothing is chosen; it needs more steps, and continues with the run"
    )
    assert capsys.readouterr().out.count(f"{unfinished}\n") == 1
    train(config_in(tmp_path, *EIGHT, *TUNED[:-1], "train.steps=10"))
    output = capsys.readouterr().out
    assert output.count("the search continues after 1 of 2 samples\n") == output.count(f"{unfinished}\n") == 1
    assert not records_of(tmp_path, "chosen")


def test_what_was_found_is_in_the_config_though_the_cache_cannot_be_written(tmp_path, capsys):
    config = config_in(tmp_path, *EIGHT, *TUNED, f"tune.cache={tmp_path}/shared/tuned.json")
    choices = open_run(config).choices
    (tmp_path / "shared").write_text("in the way, since a while")
    with RunLog(tmp_path, start_step=0, total_steps=9, tokens_per_step=1, tensorboard=False, quiet=False) as log:
        decider = tuning._Decider(choices, config.tune, tmp_path, log)
        for seconds in (0.5, 0.4):
            found = decider.measured(step=7, seconds=seconds)
    assert load_config(tmp_path) == choices.config_of(found)
    assert f"warning: {tmp_path}/shared/tuned.json does not have what was tuned: " in capsys.readouterr().out


def test_two_processes_change_their_step_together(tmp_path, monkeypatch):
    """In the background, a sum that the other process cuts elsewhere would wait for ever."""
    tuned, plain = tmp_path / "tuned", tmp_path / "plain"
    for folder in (tuned, plain):
        folder.mkdir()
    two = [*CHUNKED, "mesh.cpu_devices=2", "mesh.data=1", "mesh.expert=2", "schedule.bucket_cap_mb=0.02"]
    two += ["exchange.algorithm=background", "exchange.reduction=background"]
    launch = ["moe_jax.launch", "--processes", "2", "--grace=60"]
    with started(tuned, *launch, *two, *TUNED) as process:
        wait_until(lambda: bool(records_of(tuned, "chosen")), tuned, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, (tuned / "output").read_text()
    tried, losses = records_of(tuned, "tried"), losses_of(tuned)
    assert len({record["tried_bucket_cap_mb"] for record in tried}) == 2
    assert tried[0]["step"] < tried[1]["step"] <= max(losses)
    monkeypatch.setattr(setup, "make_mesh", lambda settings: make_mesh(settings, jax.devices()[:2]))
    train(config_in(plain, *two, f"train.steps={max(losses)}"))
    assert losses == losses_of(plain), "as in one process: two numbers have one sum"
