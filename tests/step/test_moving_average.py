"""The moving average of parameters: its definition on every kind of mesh and shard, and what reads it."""

import dataclasses
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.load import load_params
from moe_jax.config import Config
from moe_jax.config.yaml_io import to_yaml
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.step.moving_average import evaluated
from moe_jax.step.trainer import make_trainer
from tests.compiled import run_checked
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import mesh_of

DECAY = 0.75


def averaging(config: Config, decay: float | None = DECAY, zero: int = 0) -> Config:
    optimizer = dataclasses.replace(config.optimizer, ema_decay=decay, zero=zero, learning_rate=0.05, warmup_steps=0)
    return dataclasses.replace(config, optimizer=optimizer)


BIASED = averaging(small_config(2, 2, capacity_factor=8.0, bias_update_rate=0.1), zero=1)
CASES = {
    # targets are counted over devices before anything else, besides the gathering of the average
    "plain, with moments in shards and biases": dataclasses.replace(
        BIASED, data=dataclasses.replace(BIASED.data, mask_documents=True)
    ),
    "sharded parameters": averaging(
        small_config(2, 2, capacity_factor=8.0, model={"num_layers": 1}, moe_layer_freq=1), zero=3
    ),
}


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_it_follows_the_parameters_and_is_what_is_evaluated(config: Config) -> None:
    """A step with a bad loss changes nothing."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, skip_spikes=True, spike_factor=3.0))
    trainer, batch = make_trainer(config, mesh_of(config)), tokens_of(config)
    first = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), first_params(config.model), trainer.param_shapes
    )
    state = trainer.begin(first)
    expected = jax.device_get(state["params"])
    for limit in (np.inf, np.inf, 0.0):  # of the loss
        state, metrics = trainer.step(state, batch, np.float32(limit))
        assert bool(metrics["bad_step"]) == (limit == 0)
        if limit:
            new = jax.device_get(state["params"])
            expected = jax.tree.map(lambda old, x: DECAY * old + (1 - DECAY) * x, expected, new)
    chex.assert_trees_all_close(jax.device_get(state["ema"]), expected, rtol=1e-6, atol=1e-7)
    shapes = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), state["ema"])
    whole = jax.tree.map(lambda x: x.shape, state["ema"])
    assert jax.tree.leaves(shapes) != jax.tree.leaves(whole), "it is sharded like moments"
    loss = float(run_checked(trainer.evaluate, evaluated(state), batch))
    plain = averaging(small_config(1, 1, batch_size=8), decay=None)
    alone = make_trainer(dataclasses.replace(plain, model=config.model), mesh_of(plain))
    np.testing.assert_allclose(loss, alone.evaluate(expected, batch), rtol=1e-5)
    assert abs(loss - alone.evaluate(jax.device_get(state["params"]), batch)) > 1e-3


def test_a_run_keeps_its_average_and_may_change_its_decay(tmp_path: Path) -> None:
    saved = averaging(small_config(1, 1))
    (tmp_path / "config.yaml").write_text(to_yaml(saved), encoding="utf-8")
    check_same_run(averaging(saved, decay=0.9), tmp_path)
    check_same_run(averaging(saved, decay=None), tmp_path, ignore_data_order=True)
    with pytest.raises(CheckpointError, match=r"^optimizer.ema_decay=null, but .* have .*=0.75: use"):
        check_same_run(averaging(saved, decay=None), tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(averaging(saved, decay=None)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--ema: run .* has .*ema_decay=null, so no average: leave out"):
        load_params(tmp_path, {}, average=True)
