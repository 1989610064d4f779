"""The sharded step against the single-device, loop-over-experts reference: values and every gradient."""

import dataclasses
from contextlib import nullcontext

import chex
import jax
import numpy as np
import pytest

from moe_jax.config import Config, DataConfig, MeshConfig, OptimizerConfig, ScheduleConfig
from moe_jax.parallel.mesh import make_mesh
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, first_state, mesh_of, sharded_gradients
from tests.step.one_step import config_of_settings


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        (
            {"num_layers": 5},
            {"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_shared_experts": 2, "dense_residual": True},
        ),
        ({"num_layers": 2, "head_dim": 6}, {"moe_layer_freq": 1, "norm_topk_prob": False, "top_k": 6}),
        ({}, {"num_experts": 0}),
    ],
    ids=["uneven-segments", "all-moe", "dense"],
)
def test_model_variants_equal_the_reference(model, moe):
    expert = 1 if moe.get("num_experts") == 0 else 4
    assert_equals_reference(small_config(8 // expert, expert, model=model, **moe))


def run_steps(config: Config, steps: int = 3):
    trainer = make_trainer(config, mesh_of(config))
    state, records = first_state(config, trainer), []
    for seed in range(steps):
        state, metrics = trainer.step(state, tokens_of(config, seed))
        records.append(jax.device_get(metrics))
    return jax.device_get(state), records


def test_unrolling_changes_no_gradient():
    config = small_config(1, 2, model={"num_layers": 4}, moe_layer_freq=1)
    other = dataclasses.replace(config, schedule=ScheduleConfig(unroll=2))
    params = first_params(config.model)
    expected = sharded_gradients(config, params, tokens_of(config)).grads
    grads = sharded_gradients(other, params, tokens_of(config)).grads
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-7)


def test_rematerialisation_saves_memory():
    bytes_of = {}
    for remat in ("none", "dots", "full"):
        base = small_config(1, 1, model={"num_layers": 6, "hidden_size": 32}, moe_layer_freq=1)
        config = dataclasses.replace(base, schedule=ScheduleConfig(remat=remat))
        trainer = make_trainer(config, make_mesh(MeshConfig(), jax.devices()[:1]))
        compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
        bytes_of[remat] = compiled.memory_analysis().temp_size_in_bytes
    assert bytes_of["full"] < bytes_of["dots"] < bytes_of["none"]
    assert bytes_of["full"] < 0.5 * bytes_of["none"]


def test_bfloat16_gradient_of_a_frequent_token_is_not_lost():
    """2,048 equal tokens pull at one row of the embedding: a sum in bfloat16 would stop growing early."""
    config = small_config(1, 1, num_experts=0, model={"num_layers": 1})
    config = dataclasses.replace(config, data=DataConfig(seq_len=256))
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="bfloat16"))
    token_BN1 = np.full((8, 257), 3, np.int32)
    token_BN1[:, -1] = 5
    params = first_params(config.model)
    expected = sharded_gradients(config, params, token_BN1).grads
    grads = sharded_gradients(half, params, token_BN1).grads
    row, expected_row = grads["embedding"][3], expected["embedding"][3]
    np.testing.assert_allclose(row, expected_row, atol=0.05 * np.abs(expected_row).max())


def test_clipping_scales_the_whole_gradient_by_its_global_norm():
    """One SGD-like step: with AdamW the first update's size does not depend on the gradient's, so look at moments."""
    base = small_config(2, 4)
    moments = {}
    for clip in (None, 0.01):
        config = dataclasses.replace(base, optimizer=OptimizerConfig(clip_norm=clip, warmup_steps=0))
        state, records = run_steps(config, steps=1)
        moments[clip] = jax.tree.leaves(state["optimizer"])
        norm = records[0]["grad_norm"]
    assert norm > 0.01
    mu = [leaf for leaf in moments[None] if leaf.ndim]
    clipped = [leaf for leaf in moments[0.01] if leaf.ndim]
    factor = 0.01 / norm
    half = len(mu) // 2  # first moments scale with the factor, second moments with its square
    chex.assert_trees_all_close(clipped[:half], [leaf * factor for leaf in mu[:half]], rtol=1e-4, atol=1e-9)
    chex.assert_trees_all_close(clipped[half:], [leaf * factor**2 for leaf in mu[half:]], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["ragged", "flat"])
def test_evaluation_sends_ragged_rows_with_the_options_that_they_need(algorithm, monkeypatch):
    """As steps do; here it has one that no compiler knows."""
    monkeypatch.setattr("moe_jax.step.trainer.ragged_options", lambda platform: {"xla_of_ragged_rows": True})
    config = config_of_settings(
        f"mesh.data=1 mesh.expert=2 schedule.policy=unified schedule.microbatches=2 exchange.algorithm={algorithm} "
        "model.num_layers=1 model.moe.moe_layer_freq=1"
    )
    trainer = make_trainer(config, mesh_of(config))
    lowered = trainer.evaluate.lower(trainer.param_shapes, tokens_of(config))
    with pytest.raises(Exception, match="xla_of_ragged_rows") if algorithm == "ragged" else nullcontext():
        lowered.compile()
