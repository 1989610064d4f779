"""Runs whose experts change ranks: the same training, and checkpoints that resume anywhere."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from moe_jax.checkpoint.load import load_params
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.models.parameters import param_shapes
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.parallel.trees import Params
from moe_jax.run.loop import train
from moe_jax.step.context import State
from moe_jax.step.expert_placement import params_in_order
from tests.run.test_resume import SMALL
from tests.run.whole_runs import compiled_once, config_of

MOE = {"num_experts": 16, "intermediate_size": 12, "capacity_factor": None, "gate": "tests.step.skewed:choose"}
TINY = SMALL | {
    "model": SMALL["model"] | {"moe": MOE},
    "mesh": {"cpu_devices": 8, "data": 2, "expert": 4},
    "optimizer": {"schedule": "constant", "warmup_steps": 2, "ema_decay": 0.5},  # validated is the average
    "train": SMALL["train"] | {"steps": 12, "eval_every": 6},
    "checkpoint": {"every": 6},
    "migration": {"every": 2, "patience": 2, "payback_steps": None},
}
ON = "migration.enabled=true"


def config_in(folder: Path, *overrides: str):
    return config_of(folder, TINY, *overrides)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(exact):
    with compiled_once():
        yield


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "validation_loss", "load_balance_loss", "expert_load")
    rows = [tuple(str(record.get(name)) for name in names) for record in records(folder)]
    return [row for row in rows if row[1] != "None" or row[3] != "None"]


def average_in_order(state: State, stages: Stages) -> Params:
    return params_in_order(state | {"params": state["ema"]}, stages)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders and last states of a run without migration, and with it."""
    folder = tmp_path_factory.mktemp("runs")
    plain = folder / "plain", train(config_in(folder / "plain"))
    return plain, (folder / "moved", train(config_in(folder / "moved", ON)))


@pytest.fixture
def compiled() -> Iterator[list[float]]:
    """Seconds of each compilation."""
    found: list[float] = []

    def note(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def test_moves_have_one_program_and_steps_the_one_they_had(runs, compiled, tmp_path):
    """All others are those of the runs before."""
    train(config_in(tmp_path, ON, "migration.every=1", "migration.patience=1", "migration.threshold=1.05"))
    assert len([record for record in records(tmp_path) if "migrated_blocks" in record]) > 1
    assert len(compiled) == 1


def test_experts_move_and_the_run_is_the_same(runs):
    (plain, expected), (moved, state) = runs
    assert curve(moved) == curve(plain)
    stages = Stages.of(config_in(moved))
    chex.assert_trees_all_equal(jax.device_get(params_in_order(state, stages)), jax.device_get(expected["params"]))
    chex.assert_trees_all_equal(jax.device_get(average_in_order(state, stages)), jax.device_get(expected["ema"]))
    looks = [record for record in records(moved) if "rank_load" in record]
    assert [record["step"] for record in looks] == [2, 4, 6, 8, 10, 12]
    moves = [record for record in looks if "migrated_blocks" in record]
    assert moves[0]["step"] == 4, "a move needs patience"
    assert moves[0]["migrated_blocks"] == [0, 1]
    assert max(moves[0]["migration_load_after"]) < 1.2 < 1.5 < min(moves[0]["rank_load"])
    assert max(looks[2]["rank_load"]) < 1.4, "what was predicted of the window before holds in the next one"
    assert not (np.asarray(state["placement"]["slot_ME"]) == np.arange(16)).all()


@pytest.mark.parametrize("case", ["off", "on", "another mesh"])
def test_a_checkpoint_resumes_anywhere(case, runs, tmp_path):
    (plain, expected), (moved, _) = runs
    shutil.copytree(moved, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    mesh = ["mesh.data=4", "mesh.expert=2"] if "mesh" in case else []
    config = config_in(tmp_path / "run", *mesh, *([] if "off" in case else [ON]))
    state = train(config)
    found = params_in_order(state, Stages.of(config))
    assert ("placement" in state) == config.migration.enabled
    if mesh:
        assert_same_function(tmp_path / "run", found, plain, expected["params"])
    else:
        assert curve(tmp_path / "run") == curve(plain)
        chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(expected["params"]))


def assert_same_function(run: Path, params, expected_run: Path, expected_params) -> None:
    """To round-off, which Adam makes larger: all losses, and the last parameters."""
    for name in ("loss", "validation_loss"):
        found, expected = ([r[name] for r in records(folder) if name in r] for folder in (run, expected_run))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(params), jax.device_get(expected_params), rtol=1e-3, atol=1e-4)


def test_migration_can_begin_at_a_checkpoint(runs, tmp_path):
    (plain, _), _ = runs
    shutil.copytree(plain, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    config = config_in(tmp_path / "run", ON)
    train(config)
    assert curve(tmp_path / "run") == curve(plain)
    assert any("migrated_blocks" in record for record in records(tmp_path / "run"))


def test_who_loads_parameters_finds_experts_in_their_order(runs):
    (_, expected), (moved, _) = runs
    placed = jax.sharding.NamedSharding(one_device_mesh(), REPLICATED)
    shapes = param_shapes(load_config(moved).model)
    on_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes)
    chex.assert_trees_all_equal(jax.device_get(load_params(moved, on_device)), jax.device_get(expected["params"]))
    average = load_params(moved, on_device, average=True)
    chex.assert_trees_all_equal(jax.device_get(average), jax.device_get(expected["ema"]))


def test_what_does_not_pay_is_refused_with_its_figures(runs, tmp_path, capsys):
    """On simulated devices a step of a few experts saves microseconds."""
    config = config_in(tmp_path / "run", ON, "migration.payback_steps=3", "train.steps=4")
    state = train(config)
    assert (np.asarray(state["placement"]["slot_ME"]) == np.arange(16)).all()
    (refusal,) = (record for record in records(tmp_path / "run") if "refused_blocks" in record)
    assert refusal["refused_blocks"] == [0, 1]
    for cost_s, saved_s in zip(refusal["refused_cost_s"], refusal["refused_saved_s"], strict=True):
        assert cost_s > 0 < saved_s
    assert "no experts of MoE block 0 changed ranks" in capsys.readouterr().out
