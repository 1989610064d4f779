"""A run on ranks of different speeds, and checkpoints with fewer experts on slow ranks."""

import shutil

import chex
import jax
import numpy as np
import pytest

from moe_jax.config.layer_layout import Stages
from moe_jax.run.loop import train
from moe_jax.step.expert_placement import params_in_order
from tests.run.test_migrating_run import records
from tests.run.test_replicating_run import REPLICAS, config_in, losses
from tests.run.whole_runs import compiled_once

SPEEDS = "migration.rank_speeds=[1,1,1,0.25]"


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(exact):
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder and last state of a run whose router prefers the first experts."""
    folder = tmp_path_factory.mktemp("uneven")
    return folder, train(config_in(folder, *REPLICAS, SPEEDS))


def in_order(state: dict, folder):
    return jax.device_get(params_in_order(state, Stages.of(config_in(folder))))


def held(state: dict) -> list[int]:
    return (np.asarray(state["placement"]["expert_MS"]) < 16).reshape(4, -1).sum(axis=1).tolist()


def test_experts_move_by_load_and_speed(run):
    folder, state = run
    checks = [record for record in records(folder) if "rank_load" in record]
    (move,) = (record for record in checks if "migrated_blocks" in record)
    assert max(move["migration_load_after"]) < 1.2 < max(move["rank_load"])
    assert max(checks[-1]["rank_load"]) < 1.4, "what was planned holds in the next window"
    assert held(state)[3] < 4


@pytest.mark.parametrize("settings", [[SPEEDS], ["migration.rank_speeds=[0.25,1,1,1]"]])
def test_a_checkpoint_resumes_with_the_same_and_with_other_speeds(settings, run, tmp_path):
    """At step 4, after the move. With other speeds experts stay where they are until their ranks are too busy."""
    folder, expected = run
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    state = train(config_in(tmp_path / "run", *REPLICAS, *settings))
    chex.assert_trees_all_close(in_order(state, folder), in_order(expected, folder), rtol=1e-3, atol=1e-4)
    if settings == [SPEEDS]:
        assert losses(tmp_path / "run") == losses(folder)
        chex.assert_trees_all_equal(jax.device_get(state["placement"]), jax.device_get(expected["placement"]))
