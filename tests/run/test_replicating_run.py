"""A run whose hottest expert gets copies, and checkpoints with them."""

import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checkpoint.load import load_params
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CheckpointError
from moe_jax.models.parameters import param_shapes
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.rebalance.planner import num_copied
from moe_jax.run.loop import train
from moe_jax.run.restore import restore_latest
from moe_jax.run.setup import open_run
from moe_jax.step.expert_placement import first_placement, params_in_order
from tests.run.test_migrating_run import MOE, ON, TINY, average_in_order, records
from tests.run.whole_runs import compiled_once, config_of

SMALL = TINY | {
    "model": TINY["model"] | {"moe": MOE | {"gate": "tests.step.skewed:choose_first_too", "moe_layer_freq": 2}},
    "train": TINY["train"] | {"steps": 6},
    "checkpoint": {"every": 4},
}
REPLICAS = [ON, "migration.replicas=1"]


def config_in(folder: Path, *overrides: str):
    return config_of(folder, SMALL, *overrides)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(exact):
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders and last states of a run without migration, and with copies."""
    folder = tmp_path_factory.mktemp("runs")
    plain = folder / "plain", train(config_in(folder / "plain"))
    return plain, (folder / "copied", train(config_in(folder / "copied", *REPLICAS)))


def in_order(state: dict, folder: Path):
    return jax.device_get(params_in_order(state, Stages.of(config_in(folder))))


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(folder) if "loss" in record}


def test_a_hot_expert_gets_copies_and_the_run_is_the_same(runs):
    (plain, expected), (copied, state) = runs
    np.testing.assert_allclose([*losses(copied).values()], [*losses(plain).values()], rtol=1e-5)
    chex.assert_trees_all_close(in_order(state, copied), jax.device_get(expected["params"]), rtol=1e-3, atol=1e-4)
    average = jax.device_get(average_in_order(state, Stages.of(config_in(copied))))
    chex.assert_trees_all_close(average, jax.device_get(expected["ema"]), rtol=1e-3, atol=1e-4)
    (move,) = (record for record in records(copied) if "migrated_blocks" in record)
    assert move["step"] == 4, "a move needs patience"
    assert move["migration_copies"] == [1], "so many that the busiest rank is below the threshold"
    assert min(move["rank_load"]) > 2 > 1.2 > max(move["migration_load_after"])
    (later,) = (record for record in records(copied) if "rank_load" in record and record["step"] == 6)
    assert max(later["rank_load"]) < 1.4, "what was predicted of the window before holds in the next one"
    assert num_copied(state["placement"]["expert_MS"][0].tolist(), 16) == 1


@pytest.mark.parametrize("case", ["the same", "no migration"])
def test_a_checkpoint_with_copies_resumes(case, runs, tmp_path):
    """At step 4, after the move."""
    (_, expected), (copied, _) = runs
    shutil.copytree(copied, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    state = train(config_in(tmp_path / "run", *(REPLICAS if case == "the same" else [])))
    chex.assert_trees_all_close(
        in_order(state, tmp_path / "run"), jax.device_get(expected["params"]), rtol=1e-3, atol=1e-4
    )
    if case == "the same":
        assert losses(tmp_path / "run") == losses(copied)
        assert num_copied(state["placement"]["expert_MS"][0].tolist(), 16) == 1


@pytest.mark.parametrize("settings", [[ON], REPLICAS, [*REPLICAS, "migration.replicas=3"]])
def test_experts_are_in_their_order_where_slots_are_others(settings, runs, tmp_path):
    _, (copied, state) = runs
    shutil.copytree(copied, tmp_path / "run")
    config = config_in(tmp_path / "run", *settings, "mesh.data=4", "mesh.expert=2")
    run, restored = restore_latest(config, open_run(config))
    assert restored is not None
    found = restored.state
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, run.trainer.state_shapes)
    first = first_placement(config.model, 2, config.replicas)
    chex.assert_trees_all_equal(jax.device_get(found["placement"]), jax.device_get(first))
    chex.assert_trees_all_equal(in_order(found, tmp_path / "run"), in_order(state, copied))


def test_copies_can_begin_at_a_checkpoint_without(runs, tmp_path):
    (plain, expected), _ = runs
    shutil.copytree(plain, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    state = train(config_in(tmp_path / "run", *REPLICAS))
    chex.assert_trees_all_close(
        in_order(state, tmp_path / "run"), jax.device_get(expected["params"]), rtol=1e-3, atol=1e-4
    )


def test_slots_that_ranks_cannot_share_are_refused(runs, tmp_path):
    """Before anything is written."""
    _, (copied, _) = runs
    shutil.copytree(copied, tmp_path / "run")
    config = config_in(tmp_path / "run", *REPLICAS, "mesh.data=1", "mesh.expert=8", "train.steps=8")
    with pytest.raises(CheckpointError) as error:
        restore_latest(config, open_run(config))
    assert str(error.value) == (
        "mesh: 8 expert ranks cannot share the 20 positions that experts and their copies have in "
        f"log.dir={config.log.dir}: use a mesh whose expert ranks divide 20, or another log.dir"
    )


def test_who_loads_parameters_finds_experts_in_their_order(runs):
    _, (copied, state) = runs
    sharding = jax.sharding.NamedSharding(one_device_mesh(), REPLICATED)
    shapes = param_shapes(load_config(copied).model)
    on_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    chex.assert_trees_all_equal(jax.device_get(load_params(copied, on_device)), in_order(state, copied))
