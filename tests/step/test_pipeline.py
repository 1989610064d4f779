"""Pipelines: memory, lengths of stages, evaluation, checkpoints. What steps compute is in `test_every_pipeline.py`."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.config import Config, MeshConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import to_yaml
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.models.parameters import stored
from moe_jax.run.sample import sample_tokens
from moe_jax.step.pipelined.build import make_plan
from moe_jax.step.pipelined.model_chunk import ModelChunk
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import mesh_of

PIPELINES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": "gpipe"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved": {"pipeline": "interleaved", "virtual_stages": 2},
    "zero_bubble": {"pipeline": "zero_bubble"},
    "coscheduled": {"pipeline": "coscheduled"},
    "coscheduled-chunks": {"pipeline": "coscheduled", "virtual_stages": 2},
    "coscheduled_split": {"pipeline": "coscheduled_split"},
    "coscheduled_split-chunks": {"pipeline": "coscheduled_split", "virtual_stages": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "even": {"moe_layer_freq": 1, "model": {"num_layers": 4}},
    # the lowest block is like no other: stages of two blocks and of one
    "dense below": {"moe_layer_freq": 1, "first_k_dense_replace": 1, "model": {"num_layers": 3}},
    # four chunks of one and two blocks
    "tied": {"moe_layer_freq": 1, "model": {"num_layers": 5, "tie_word_embeddings": True}},
}


def config_of(mesh: tuple[int, int, int], model: str, parts: int, schedule: dict[str, Any]) -> Config:
    """32 sequences of 6 tokens."""
    pipeline, data, expert = mesh
    sizes = {"pipeline": pipeline, "batch_size": 32, "seq_len": 6, "grad_accumulation": parts}
    return small_config(data, expert, **sizes, schedule=schedule, **MODELS[model])


def stored_params(config: Config) -> Any:
    return jax.device_get(jax.jit(functools.partial(stored, stages=Stages.of(config)))(first_params(config.model)))


@pytest.mark.parametrize(
    ("blocks", "stages", "head", "sizes"),
    [
        *((8, 4, 0, [2, 2, 2, 2]), (7, 4, 0, [2, 2, 2, 1]), (9, 4, 0, [2, 2, 3, 2])),
        *((8, 4, 1, [2, 2, 3, 1]), (12, 4, 4, [3, 4, 4, 1]), (5, 4, 9, [1, 1, 2, 1])),
    ],
)
def test_stages_are_as_long_as_each_other_with_the_head(blocks, stages, head, sizes):
    model = small_config(1, 1, model={"num_layers": blocks}, moe_layer_freq=1).model
    assert list(map(len, Stages(model, stages, 1, head).groups)) == sizes


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_last_stage_stores_the_block_of_multi_token_prediction(chunks: int) -> None:
    """It counts as a block when blocks are divided, but no pass over blocks runs it, as the head's pass does."""
    model = small_config(1, 1, model={"num_layers": 12, "num_nextn_predict_layers": 1}, moe_layer_freq=1).model
    stages = Stages(model, 4, chunks)
    assert list(map(len, stages.groups)) == ([3, 3, 4, 2] if chunks == 1 else [1, 1, 1, 2, 2, 2, 2, 1])
    assert sum(map(len, stages.groups)) == 12
    total, *rows = stages.layout[-1]
    assert (total, rows) == (4, [3])


def evaluated(config: Config) -> jax.Array:
    trainer = make_trainer(config, mesh_of(config))
    placed = jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes["params"])
    return trainer.evaluate(jax.device_put(stored_params(config), placed), tokens_of(config))


@functools.lru_cache
def evaluated_without_stages() -> float:
    return float(evaluated(config_of((1, 1, 2), "even", 4, {})))


@pytest.mark.parametrize("name", PIPELINES)
def test_evaluation_runs_each_forward_pass(name):
    """Also those that a step pairs with backward passes."""
    loss = evaluated(config_of((2, 1, 2), "even", 4, PIPELINES[name]))
    np.testing.assert_allclose(loss, evaluated_without_stages(), rtol=1e-6)


def test_evaluation_traces_no_backward_pass(monkeypatch):
    traced = []
    for name in ("_run_forward", "_run_input_gradient"):
        run = getattr(ModelChunk, name)
        monkeypatch.setattr(ModelChunk, name, lambda *args, n=name, run=run: traced.append(n) or run(*args))
    config = config_of((2, 1, 1), "even", 4, PIPELINES["zero_bubble"])
    trainer = make_trainer(config, mesh_of(config))
    jax.eval_shape(trainer.evaluate, trainer.state_shapes["params"], tokens_of(config))
    assert set(traced) == {"_run_forward"}


def test_evaluation_and_samples_see_the_blocks_in_their_order():
    """For chunks, the shorter ones of which leave rows unused."""
    config, plain = (
        config_of((stages, 1, 2), "tied", 2, PIPELINES[name]) for stages, name in [(2, "interleaved"), (1, "1f1b")]
    )
    np.testing.assert_allclose(*map(evaluated, (config, plain)), rtol=1e-6)
    prompt = np.arange(3, dtype=np.int32)
    texts = [sample_tokens(each, stored_params(each), prompt, 3, temperature=0, seed=0) for each in (config, plain)]
    np.testing.assert_array_equal(*texts)


def test_one_forward_one_backward_keeps_less_than_gpipe():
    """At most 2 of 8 microbatches on 2 stages, whatever else the step needs."""
    temporaries = {}
    for name in ("gpipe", "1f1b"):
        config = small_config(
            1, 1, pipeline=2, grad_accumulation=8, num_experts=0, seq_len=48, schedule=PIPELINES[name]
        )
        trainer = make_trainer(config, mesh_of(config))
        compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries["1f1b"] < 0.5 * temporaries["gpipe"]


def test_checkpoints_of_other_rows_are_refused(tmp_path):
    """Stages that cut all blocks evenly lie like no stages at all."""
    even, uneven = config_of((2, 2, 2), "even", 2, {}), config_of((2, 2, 2), "dense below", 2, {})
    (tmp_path / "config.yaml").write_text(to_yaml(even))
    check_same_run(dataclasses.replace(even, mesh=MeshConfig(data=2, expert=2)), tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(uneven))
    check_same_run(uneven, tmp_path)
    with pytest.raises(CheckpointError, match=r"^mesh\.pipeline=1 .* order of mesh\.pipeline=2 with .*: use"):
        check_same_run(dataclasses.replace(uneven, mesh=MeshConfig(data=2, expert=2)), tmp_path)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.pipeline=4 needs as many .* has 2 .*use mesh\.pipeline=2 or less"):
        Stages.of(small_config(1, 1, pipeline=4, moe_layer_freq=1))


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pass_of_the_table_runs_once(name):
    """Each forward and backward pass of a microbatch through a chunk, alone or with another; the ends once each."""
    config = config_of((2, 1, 2), "tied", 4, PIPELINES[name])
    plan = make_plan(config, mesh_of(config))
    passes, chunks = plan.pass_runs, plan.table.chunks
    count = {scope.rsplit("_", 1)[0]: 0 for scope in passes}
    for scope, runs in passes.items():
        count[scope.rsplit("_", 1)[0]] += int(runs.sum())
    pairs = count.get("pass_together", 0)
    assert count["pass_forward"] + pairs == count["pass_backward"] + pairs == 4 * 2 * chunks
    assert [int(passes[f"pass_{end}"].sum()) for end in ("embed", "head", "embed_back")] == [4, 4, 4]
    assert (pairs > 0) == plan.has_pairs
    assert count.get("pass_weight", 0) == (4 * 2 * chunks if plan.table.split_weight_grad else 0)
