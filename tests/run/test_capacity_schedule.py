"""A run whose capacity factor changes is two runs, one with each factor, of which the second resumes from the first."""

import json
from pathlib import Path

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.run import describe, loop
from moe_jax.run.loop import train
from moe_jax.run.setup import Programs, Run, compile_programs
from moe_jax.step.compile import config_at
from moe_jax.telemetry.run_log import read_metrics

SMALL = {
    "model": {
        "hidden_size": 16,
        "num_layers": 1,
        "moe": {"num_experts": 8, "intermediate_size": 12, "capacity_factor": 1.0},
    },
    "mesh": {"cpu_devices": 8, "data": 1, "expert": 8},
    "data": {"seq_len": 16},
    "optimizer": {"schedule": "constant", "warmup_steps": 80},
    "train": {"steps": 4, "batch_size": 8, "compute_dtype": "float32", "eval_every": 2, "eval_batches": 1},
    "checkpoint": {"every": 0},
    "log": {"every": 1, "tensorboard": False, "sample_tokens": 0},
}


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs share what they start with, and none measures the matrix rate."""
    done: dict[object, Programs] = {}

    def compile_first(run: Run) -> Programs:
        factor = config_at(run.config, run.first_step + 1).model.moe.capacity_factor
        return done.setdefault(factor, done.get(factor) or compile_programs(run))

    monkeypatch.setattr(loop, "compile_programs", compile_first)
    for module in (loop, describe):
        monkeypatch.setattr(module, "matrix_flops_per_s", lambda dtype: 1e12)


def trained(folder: Path, *settings: str) -> list[dict[str, object]]:
    """What a run recorded of its steps and validations, without times."""
    folder.mkdir(exist_ok=True)
    (folder / "experiment.yaml").write_text(json.dumps(SMALL))
    train(load_config(folder / "experiment.yaml", [f"log.dir={folder}", *settings]))
    names = ("step", "loss", "grad_norm", "dropped_fraction", "validation_loss")
    return [{name: record[name] for name in names if name in record} for record in read_metrics(folder)]


def test_each_step_and_validation_has_the_factor_of_its_step(tmp_path: Path, capsys) -> None:
    """Also of a run that resumes after the change."""
    scheduled = "model.moe.capacity_schedule=[[3,0.5]]"
    trained(tmp_path / "one", scheduled, "train.steps=3")
    assert "step 3: continuing with model.moe.capacity_factor=0.5\n" in capsys.readouterr().out
    found = trained(tmp_path / "one", scheduled)
    assert {"step": 3} in found, "the change is a record"
    trained(tmp_path / "two", "train.steps=2")
    expected = trained(tmp_path / "two", "model.moe.capacity_factor=0.5")
    assert [record for record in found if len(record) > 1 and "validation_loss" not in record] == [
        record for record in expected if "validation_loss" not in record
    ]
    validated, wanted = (
        {record["step"]: record["validation_loss"] for record in each if "validation_loss" in record}
        for each in (found, expected)
    )
    assert {step: validated[step] for step in wanted} == wanted
    dropped = {record["step"]: record["dropped_fraction"] for record in expected if "loss" in record}
    assert max(dropped[1], dropped[2]) < min(dropped[3], dropped[4])
