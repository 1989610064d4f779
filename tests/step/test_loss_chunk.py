"""Steps whose loss is computed chunk by chunk: the function stays the same on any mesh and in any order of tasks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import Config, MoEConfig
from moe_jax.step.compile import batch_shape, step_program
from moe_jax.step.losses import ObjectiveParts, metrics_of
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.step_dims import StepDims
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, mesh_of
from tests.step.test_tensor_axis import UNIFIED

DENSE = {"num_experts": 0, "batch_size": 4}


def in_chunks(config: Config, tokens: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk=tokens))


@pytest.mark.parametrize(
    ("config", "least"),
    [
        (small_config(2, 1, schedule=UNIFIED, model={"num_layers": 1}, **DENSE), True),
    ],
    ids=["scheduled"],
)
def test_loss_and_gradients_equal_the_reference(config, least, monkeypatch):
    """For 12 tokens, at once and in chunks of 4; `least`: tasks store what they store on TPUs."""
    monkeypatch.setattr(StepDims, "min_cut_remat", least)
    assert_equals_reference(in_chunks(config, 5))


def test_the_loss_of_a_dense_model_has_the_z_loss():
    none = jnp.float32(0)
    parts = ObjectiveParts(jnp.float32(3), none, none, jnp.zeros((0, 0), jnp.int32), jnp.zeros(0), jnp.float32(20))
    metrics = metrics_of(parts, none, none, MoEConfig(num_experts=0), 0.1)
    assert (float(metrics["loss"]), float(metrics["cross_entropy"]), float(metrics["z_loss"])) == (5.0, 3.0, 20.0)


def test_validation_computes_the_same():
    config, losses = small_config(2, 1, model={"num_layers": 1}, **DENSE), []
    for each in (config, in_chunks(config, 8)):
        losses.append(make_trainer(each, mesh_of(each)).evaluate(first_params(config.model), tokens_of(config)))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_the_heads_gradient_is_in_memory_once_however_many_microbatches():
    """It is summed in one array; one for each microbatch would take two more with 4 than with 2."""
    vocab = 2**12

    def temporaries(microbatches: int) -> int:
        schedule = UNIFIED | {"microbatches": microbatches}
        model = {"num_layers": 1, "vocab_size": vocab}
        config = in_chunks(small_config(2, 1, schedule=schedule, model=model, num_experts=0), 4)
        trainer = make_trainer(config, mesh_of(config))
        memory = step_program(trainer, batch_shape(config, trainer.mesh), None).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(4) - temporaries(2) < 4 * 16 * vocab / 2


def test_the_next_task_waits_for_the_one_weight_gradient_of_the_head(monkeypatch):
    """Other microbatches' are zeros, for which nothing would wait."""
    shapes: list[tuple[int, ...]] = []
    record = IssueOrder.record_compute

    def spy(self, result, *others):
        shapes.append(result.shape)
        record(self, result, *others)

    monkeypatch.setattr(IssueOrder, "record_compute", spy)
    schedule = UNIFIED | {"weight_grad": "greedy"}
    config = in_chunks(small_config(2, 1, schedule=schedule, model={"num_layers": 1}, **DENSE), 5)
    trainer = make_trainer(config, mesh_of(config))
    trainer.step.trace(*trainer.step_shapes(batch_shape(config, trainer.mesh)))
    assert shapes.count((config.model.hidden_size, config.model.vocab_size)) == 1
