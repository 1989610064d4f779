"""Pipelined steps against the same step without stages: metrics and every gradient."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest

from moe_jax.config import Config, Mesh, Optimizer
from moe_jax.config_files import to_yaml
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.models.stages import Stages
from moe_jax.train.checkpoint import check_same_run
from moe_jax.train.sample import sample_tokens
from moe_jax.train.step import Trainer, make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.train.gradients import mesh_of

PIPELINES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": "gpipe"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved": {"pipeline": "interleaved", "virtual_stages": 2},
    "zero_bubble": {"pipeline": "zero_bubble"},
    "coscheduled": {"pipeline": "coscheduled"},
    "coscheduled-chunks": {"pipeline": "coscheduled", "virtual_stages": 2},
}
POLICIES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "greedy": {"weight_grad": "greedy", "remat": "dots"},
    "expert_pipeline": {"policy": "expert_pipeline", "microbatches": 2},
    "unified": {"policy": "unified", "microbatches": 2, "backward_microbatches": 1, "weight_grad": "greedy"},
}
MODELS: dict[str, dict[str, Any]] = {
    "even": {"every": 1, "model": {"num_layers": 4}},
    "tied": {"every": 1, "model": {"num_layers": 4, "tie_embeddings": True}, "num_shared_experts": 1},
    # the lowest block is like no other
    "uneven": {"every": 1, "first_dense_blocks": 1, "model": {"num_layers": 3}, "capacity_factor": None},
    "uneven-chunks": {"every": 1, "model": {"num_layers": 5}},
}
# pipeline, data, expert; the schedules of stages and those inside of them; parts of the batch
CASES = [
    ("1f1b", (4, 1, 2), "even", "vanilla", 4),
    ("1f1b", (2, 2, 2), "uneven", "greedy", 2),
    ("1f1b", (2, 1, 4), "tied", "unified", 4),
    ("gpipe", (2, 2, 2), "uneven", "expert_pipeline", 2),
    ("interleaved", (2, 2, 2), "uneven-chunks", "vanilla", 2),
    ("interleaved", (2, 1, 4), "tied", "expert_pipeline", 4),
    ("zero_bubble", (2, 2, 2), "uneven", "vanilla", 2),
    ("zero_bubble", (4, 1, 2), "even", "unified", 4),
    ("coscheduled", (4, 1, 2), "even", "expert_pipeline", 4),
    ("coscheduled-chunks", (2, 1, 4), "tied", "greedy", 4),
    ("coscheduled", (1, 2, 2), "uneven", "vanilla", 2),
]


def config_of(mesh: tuple[int, int, int], model: str, parts: int, schedule: dict[str, Any]) -> Config:
    """32 sequences of 6 tokens."""
    pipeline, data, expert = mesh
    sizes = {"pipeline": pipeline, "batch_size": 32, "seq_len": 6, "grad_accumulation": parts}
    return small_config(data, expert, **sizes, schedule=schedule, **MODELS[model])


class Result(NamedTuple):
    metrics: Any
    grads: Any  # in the order of blocks


def trainer_of(config: Config) -> Trainer:
    """Whose first moments, behind one step, are a tenth of the gradients."""
    config = dataclasses.replace(config, optimizer=Optimizer(clip_norm=None))
    return make_trainer(config, mesh_of(config))


def stored_params(config: Config) -> Any:
    return jax.device_get(jax.jit(Stages.of(config).stored)(first_params(config.model)))


def result_of(config: Config) -> Result:
    trainer = trainer_of(config)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trainer.state_shapes["optimizer"])
    state = {"step": np.int32(0), "params": stored_params(config), "optimizer": zeros}
    placed = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes))
    state, metrics = trainer.step(placed, tokens_of(config))
    moments = jax.device_get(state["optimizer"][0].mu)
    return Result(jax.device_get(metrics), jax.device_get(jax.jit(Stages.of(config).in_order)(moments)))


@functools.cache
def without_stages(data: int, expert: int, model: str, parts: int) -> Result:
    return result_of(config_of((1, data, expert), model, parts, {}))


@pytest.mark.parametrize(("pipeline", "mesh", "model", "policy", "parts"), CASES)
def test_a_pipelined_step_computes_what_a_step_without_stages_computes(pipeline, mesh, model, policy, parts):
    result = result_of(config_of(mesh, model, parts, PIPELINES[pipeline] | POLICIES[policy]))
    assert_same(result, without_stages(*mesh[1:], model, parts))


def assert_same(result: Result, expected: Result) -> None:
    chex.assert_trees_all_close(result.metrics, expected.metrics, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(result.grads, expected.grads, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize(
    ("pipeline", "model"), [("1f1b", "uneven"), ("interleaved", "even")], ids=["unused rows", "chunks"]
)
def test_evaluation_and_samples_see_the_blocks_in_their_order(pipeline, model):
    config = config_of((2, 1, 2), model, 2, PIPELINES[pipeline])
    plain = config_of((1, 1, 2), model, 2, {})
    losses = []
    for each in (config, plain):
        trainer = trainer_of(each)
        placed = jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes["params"])
        losses.append(trainer.evaluate(jax.device_put(stored_params(each), placed), tokens_of(each)))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    prompt = np.arange(3, dtype=np.int32)
    texts = [sample_tokens(each, stored_params(each), prompt, 3, temperature=0, seed=0) for each in (config, plain)]
    np.testing.assert_array_equal(*texts)


def test_one_forward_one_backward_keeps_less_than_gpipe():
    """Of 8 microbatches at most 2 on 2 stages, whatever else the step needs."""
    temporaries = {}
    for pipeline in ("gpipe", "1f1b"):
        config = small_config(
            *(1, 1), pipeline=2, grad_accumulation=8, every=1, seq_len=48, schedule=PIPELINES[pipeline]
        )
        trainer = trainer_of(config)
        compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
        temporaries[pipeline] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries["1f1b"] < 0.5 * temporaries["gpipe"]


def test_checkpoints_of_other_rows_are_refused(tmp_path):
    """Stages that cut all blocks evenly lie like no stages at all."""
    even, uneven = config_of((2, 2, 2), "even", 2, {}), config_of((2, 2, 2), "uneven", 2, {})
    (tmp_path / "config.yaml").write_text(to_yaml(even))
    check_same_run(dataclasses.replace(even, mesh=Mesh(data=2, expert=2)), tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(uneven))
    check_same_run(uneven, tmp_path)
    with pytest.raises(CheckpointError, match=r"^mesh\.pipeline=1 .* order of mesh\.pipeline=2 with .*: use"):
        check_same_run(dataclasses.replace(uneven, mesh=Mesh(data=2, expert=2)), tmp_path)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.pipeline=4 needs as many .* has 2 .*use mesh\.pipeline=2 or less"):
        Stages.of(small_config(1, 1, pipeline=4, every=1))
