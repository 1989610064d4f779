"""Biases that balance experts: moved by the counts of the whole batch alone, in every form of step, and kept."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from moe_jax.checkpoint.arrays import read_arrays
from moe_jax.checkpoint.checksums import digest_program
from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.files import check_files
from moe_jax.checkpoint.save import Checkpoints
from moe_jax.config import Config, OptimizerConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import to_yaml
from moe_jax.errors import CheckpointError
from moe_jax.models.parameters import in_order
from moe_jax.step.router_bias import direction
from moe_jax.step.trainer import make_trainer
from moe_jax.telemetry.run_log import RunLog
from tests import references
from tests.small import block_params, small_config
from tests.step.gradients import assert_equals_reference, first_state, mesh_of
from tests.step.test_trainer import run_steps

RATE, STEPS = 0.25, 3


def biases(state: dict[str, Any], config: Config) -> np.ndarray:
    """The biases of all blocks with experts, from the bottom up."""
    params = in_order(state["params"], Stages.of(config))
    return np.array([block["moe"]["score_bias"] for block in block_params(params, config.model) if "moe" in block])


def counts(record: dict[str, Any], config: Config) -> np.ndarray:
    pairs = config.train.batch_size * config.data.seq_len * config.model.moe.top_k
    return np.rint(record["expert_load"] * pairs).astype(int)


def config_of(data: int, expert: int, **changes) -> Config:
    """Three blocks with experts above a dense one; nothing depends on the mesh."""
    settings = {
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "capacity_factor": None,
        "exchange": {"rank_capacity_factor": None},
    }
    settings |= {"model": {"num_layers": 4}, "gate": "sigmoid", "bias_update_rate": RATE, "aux_loss_coeff": 0.0}
    return small_config(data, expert, **(settings | {"seq_len": 8} | changes))


@functools.cache
def ran(name: str) -> Any:
    return run_steps(STEP_FORMS[name], STEPS)


UNIFIED = {"policy": "unified", "microbatches": 2, "weight_grad": "greedy"}
STEP_FORMS = {
    "autodiff": config_of(1, 2, tensor=2, context=2),
    "scheduled, in parts": config_of(1, 2, schedule=UNIFIED, grad_accumulation=2),
    "stages": config_of(1, 2, pipeline=2, schedule={"pipeline": "zero_bubble"}, grad_accumulation=2),
    "zero": dataclasses.replace(
        config_of(2, 1, gate="deepseek_v3", model={"num_layers": 2}, grad_accumulation=2),
        optimizer=OptimizerConfig(zero=2),
    ),
}


def test_each_turn_of_a_loop_has_the_shares_of_its_own_block():
    assert_equals_reference(config_of(1, 2, aux_loss_coeff=0.5, batch_size=4, schedule=UNIFIED))


@pytest.mark.parametrize("name", STEP_FORMS)
def test_every_form_of_step_moves_biases_by_what_the_whole_batch_chose(name):
    config = STEP_FORMS[name]
    state, records = ran(name)
    expected_ME = np.zeros((config.model.block_kinds.count("moe"), config.model.moe.num_experts), np.float32)
    for record in records:
        count_ME = counts(record, config)
        pairs = config.train.batch_size * config.data.seq_len * config.model.moe.top_k
        assert (count_ME.sum(axis=-1) == pairs).all()
        expected_ME = np.array([references.moved_bias(*row, RATE) for row in zip(expected_ME, count_ME, strict=True)])
    np.testing.assert_array_equal(biases(state, config), expected_ME)
    assert expected_ME.any(axis=-1).all(), "of every block"


def test_the_mesh_and_the_form_of_a_step_change_no_bias():
    expected, *others = (
        biases(ran(name)[0], STEP_FORMS[name]) for name in ("autodiff", "scheduled, in parts", "stages")
    )
    for other in others:
        np.testing.assert_array_equal(other, expected)


def test_the_direction_is_exact_for_many_pairs():
    mean = 2**27 + 1  # no float32
    count_E = np.array([mean - 1, mean, mean, mean + 1, mean, mean, mean, mean], np.int32)
    np.testing.assert_array_equal(direction(count_E[None]), [[1, 0, 0, -1, 0, 0, 0, 0]])
    count_E[1] += 1  # now the mean lies between whole numbers
    np.testing.assert_array_equal(direction(count_E[None]), [[1, -1, 1, -1, 1, 1, 1, 1]])


def test_the_optimizer_knows_no_bias_and_checkpoints_do(tmp_path: Path):
    """One that does not move is not decayed, and has no moments; all others have two."""
    config = config_of(2, 1, bias_update_rate=0.0, model={"num_layers": 2})
    config = dataclasses.replace(config, optimizer=OptimizerConfig(weight_decay=0.5))
    trainer = make_trainer(config, mesh_of(config))
    state = first_state(config, trainer)
    ones = jax.tree.map(np.ones_like, jax.device_get(state["params"]))
    state, _ = trainer.step(state | {"params": ones}, np.zeros((8, 9), np.int32))
    assert (biases(state, config) == 1).all()
    assert len(jax.tree.leaves(state["optimizer"])) == 2 * (len(jax.tree.leaves(ones)) - 1) + 2
    log = RunLog(tmp_path, start_step=0, total_steps=1, tokens_per_step=1, tensorboard=False, quiet=True)
    about = {"config": {}, "mesh": {}, "versions": {}}
    with Checkpoints(tmp_path, 1, log, digest_program(state), about) as checkpoints:
        checkpoints.save(1, state, data={})
    restored = read_arrays(tmp_path, check_files(tmp_path, 1), trainer.state_shapes)
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))


def test_the_rate_of_a_run_may_change_where_its_parameters_stay(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(config_of(2, 1)))
    check_same_run(config_of(2, 1, bias_update_rate=0.0), tmp_path)
    with pytest.raises(CheckpointError, match=r"bias_update_rate=null, .* use model.moe.bias_update_rate=0.25"):
        check_same_run(config_of(2, 1, bias_update_rate=None), tmp_path)
