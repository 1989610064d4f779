"""Pipelined steps against the same step without stages: metrics and every gradient."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest

from moe_jax.config import Config, Mesh
from moe_jax.config_files import to_yaml
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.models.parameters import param_dims
from moe_jax.models.stages import in_order, stored
from moe_jax.models.transformer import Computation
from moe_jax.parallel import background
from moe_jax.parallel.grad_sync import sum_over_batch
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED, partitions
from moe_jax.parallel.zero import no_cuts
from moe_jax.stages import Stages
from moe_jax.train.gradients import gradients_of, plan_of
from moe_jax.train.objective import Parts
from moe_jax.train.pipeline.plan import make_plan
from moe_jax.train.same_run import check_same_run
from moe_jax.train.sample import sample_tokens
from moe_jax.train.step import make_trainer
from tests import references
from tests.compiled import run_checked
from tests.small import first_params, small_config, tokens_of
from tests.train.gradients import mesh_of
from tests.train.test_step import run_steps

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
POLICIES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "greedy": {"weight_grad": "greedy", "remat": "full"},
    "expert_pipeline": {"policy": "expert_pipeline", "microbatches": 2},
    "unified": {"policy": "unified", "microbatches": 2, "backward_microbatches": 1, "weight_grad": "greedy"},
}
MODELS: dict[str, dict[str, Any]] = {
    "even": {"every": 1, "model": {"num_layers": 4}},
    # the lowest block is like no other: stages of two blocks and of one
    "dense below": {"every": 1, "first_dense_blocks": 1, "model": {"num_layers": 3}},
    "deep": {"every": 1, "model": {"num_layers": 8}},
    # four chunks of one and two blocks
    "tied": {"every": 1, "model": {"num_layers": 5, "tie_embeddings": True}},
}
# Stages and what they run; pipeline, data, expert ranks; the model; what runs inside a pass; parts of the batch
CASES = [
    ("1f1b", (4, 1, 2), "even", "unified", 4),
    ("zero_bubble", (4, 1, 2), "even", "vanilla", 4),
    ("coscheduled", (4, 1, 2), "even", "expert_pipeline", 4),
    ("coscheduled_split", (4, 1, 2), "even", "unified", 4),
    ("coscheduled_split-chunks", (2, 1, 4), "tied", "greedy", 4),
    ("1f1b", (2, 2, 2), "dense below", "greedy", 2),
    ("gpipe", (2, 2, 2), "dense below", "vanilla", 2),
    ("zero_bubble", (2, 2, 2), "dense below", "expert_pipeline", 2),
    ("coscheduled", (1, 2, 2), "dense below", "vanilla", 2),
    ("interleaved", (2, 1, 4), "tied", "vanilla", 4),
    ("coscheduled-chunks", (2, 1, 4), "tied", "greedy", 4),
    ("1f1b", (8, 1, 1), "deep", "vanilla", 8),
    ("coscheduled", (2, 1, 1), "tied", "vanilla", 2),
]


def config_of(
    mesh: tuple[int, int, int], model: str, parts: int, schedule: dict[str, Any], exchange: str = "auto"
) -> Config:
    """32 sequences of 6 tokens."""
    pipeline, data, expert = mesh
    sizes = {"pipeline": pipeline, "batch_size": 32, "seq_len": 6, "grad_accumulation": parts}
    return small_config(data, expert, **sizes, schedule=schedule, exchange={"algorithm": exchange}, **MODELS[model])


class Result(NamedTuple):
    """What a step computes before its optimiser runs."""

    parts: Parts  # summed over devices
    grads: Any  # in the order of blocks


def stored_params(config: Config) -> Any:
    return jax.device_get(jax.jit(functools.partial(stored, stages=Stages.of(config)))(first_params(config.model)))


def result_of(config: Config) -> Result:
    mesh, specs = mesh_of(config), partitions(param_dims(config.model), expert_axis(config.mesh))
    how, plan, stages = Computation.of(config, mesh), plan_of(config, mesh), Stages.of(config)
    tokens = config.train.batch_size * config.data.seq_len

    background.connect(mesh)

    def body(params: Any, token_BN1: jax.Array) -> tuple[Any, Parts]:
        background.new_program()
        grads, parts = gradients_of(params, token_BN1, config, how, tokens, specs, no_cuts(specs), plan)
        return grads, sum_over_batch(parts)

    on_mesh = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=(specs, REPLICATED), check_vma=False
    )
    grads, parts = run_checked(jax.jit(on_mesh), stored_params(config), tokens_of(config))
    return Result(parts, jax.device_get(jax.jit(functools.partial(in_order, stages=stages))(grads)))


@functools.cache
def without_stages(data: int, expert: int, model: str, parts: int) -> Result:
    return result_of(config_of((1, data, expert), model, parts, {}))


@pytest.mark.parametrize(("pipeline", "mesh", "model", "policy", "parts"), CASES)
def test_a_pipelined_step_computes_what_a_step_without_stages_computes(pipeline, mesh, model, policy, parts):
    result = result_of(config_of(mesh, model, parts, PIPELINES[pipeline] | POLICIES[policy]))
    assert_same(result, without_stages(*mesh[1:], model, parts))


def test_a_pipelined_step_is_the_mean_of_its_parts_on_one_device():
    mesh, parts = (2, 2, 2), 2
    config = config_of(mesh, "tied", parts, PIPELINES["coscheduled-chunks"])
    result, params = result_of(config), first_params(config.model)
    own_DABN1 = tokens_of(config).reshape(4, parts, -1, config.data.seq_len + 1)  # of each rank, part by part
    run = jax.value_and_grad(references.objective, has_aux=True)
    found = [
        run(params, token_DBN1.reshape(-1, token_DBN1.shape[-1]), config.model, 4)
        for token_DBN1 in np.moveaxis(own_DABN1, 1, 0)
    ]
    told, grads = zip(*found, strict=True)
    for name in ("cross_entropy", "load_balance_loss", "router_z_loss"):
        expected = np.mean([each[name] for _, each in told])
        np.testing.assert_allclose(getattr(result.parts, name), expected, rtol=5e-6, err_msg=name)
    np.testing.assert_array_equal(result.parts.count_ME, sum(each["count_ME"] for _, each in told))
    mean = jax.tree.map(lambda *each: sum(each) / parts, *grads)
    chex.assert_trees_all_close(result.grads, mean, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("pipeline", "policy"), [("1f1b", "unified"), ("coscheduled", "vanilla")])
def test_tensor_ranks_of_each_stage_share_its_widths(pipeline, policy):
    settings = {2: PIPELINES[pipeline] | POLICIES[policy], 1: {}}
    configs = (config_of((stages, 1, 2), "tied", 2, settings[stages]) for stages in (2, 1))
    assert_same(*(result_of(dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, tensor=2))) for c in configs))


@pytest.mark.parametrize(
    ("pipeline", "mesh"),
    [("1f1b", (4, 1, 2)), ("coscheduled", (4, 1, 2)), ("coscheduled_split", (4, 1, 2)), ("interleaved", (2, 1, 4))],
)
def test_stages_that_send_in_the_background_compute_the_same(pipeline, mesh):
    result = result_of(config_of(mesh, "tied", 4, PIPELINES[pipeline], "background"))
    assert_same(result, without_stages(*mesh[1:], "tied", 4))


@pytest.mark.parametrize("pipeline", ["zero_bubble", "coscheduled_split"])
def test_pieces_of_the_slots_may_be_empty(pipeline):
    """Three slots of an expert in eight pieces."""
    schedule = PIPELINES[pipeline] | {"policy": "expert_pipeline", "microbatches": 8}
    small = {"batch_size": 8, "seq_len": 6, "every": 1, "grad_accumulation": 2, "model": {"num_layers": 2}}
    config, plain = small_config(1, 2, pipeline=2, schedule=schedule, **small), small_config(1, 2, **small)
    assert_same(result_of(config), result_of(plain))


def test_a_last_stage_with_fewer_blocks_computes_the_same():
    config = config_of((2, 1, 2), "even", 2, {"head_blocks": 1})
    assert list(map(len, Stages.of(config).groups)) == [3, 1]
    assert_same(result_of(config), without_stages(1, 2, "even", 2))


@pytest.mark.parametrize(
    ("blocks", "stages", "head", "sizes"),
    [
        *((8, 4, 0, [2, 2, 2, 2]), (7, 4, 0, [2, 2, 2, 1]), (9, 4, 0, [2, 2, 3, 2])),
        *((8, 4, 1, [2, 2, 3, 1]), (12, 4, 4, [3, 4, 4, 1]), (5, 4, 9, [1, 1, 2, 1])),
    ],
)
def test_stages_are_as_long_as_each_other_with_the_head(blocks, stages, head, sizes):
    model = small_config(1, 1, model={"num_layers": blocks}, every=1).model
    assert list(map(len, Stages(model, stages, 1, head).groups)) == sizes


@pytest.mark.parametrize("shared", [False, True], ids=["", "experts, too"])
def test_context_ranks_of_each_stage_share_its_sequences(shared):
    stages, none = (
        small_config(
            *(1, 2),
            **{"pipeline": size, "context": 2, "batch_size": 8, "seq_len": 8, "grad_accumulation": 2},
            experts_over_context=shared,
            exchange={"context_form": "all_gather"},
            **MODELS["dense below"],
        )
        for size in (2, 1)
    )
    assert_same(result_of(stages), result_of(none))


def assert_same(result: Result, expected: Result) -> None:
    np.testing.assert_array_equal(result.parts.count_ME, expected.parts.count_ME)
    chex.assert_trees_all_close(result.parts, expected.parts, rtol=1e-5)
    chex.assert_trees_all_close(result.grads, expected.grads, rtol=2e-4, atol=2e-6)


def test_a_pipelined_run_learns_what_a_run_without_stages_learns():
    """Through the trainer: norm and optimiser of parameters that stages hold, metrics, evaluation."""
    small = {"grad_accumulation": 2, "seq_len": 6, "every": 1}
    config, plain = (small_config(1, 2, pipeline=stages, **small) for stages in (2, 1))
    results = []
    for each in (config, plain):
        state, records = run_steps(each, steps=2)
        take = jax.jit(functools.partial(in_order, stages=Stages.of(each)))
        results.append((records, [take(tree) for tree in (state["params"], state["optimizer"][0].nu)]))
    chex.assert_trees_all_close(*(records for records, _ in results), rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(*(trees for _, trees in results), rtol=1e-4, atol=1e-6)


def test_evaluation_and_samples_see_the_blocks_in_their_order():
    """Of chunks, the shorter ones of which leave rows unused."""
    config, plain = (
        config_of((stages, 1, 2), "tied", 2, PIPELINES[name]) for stages, name in [(2, "interleaved"), (1, "1f1b")]
    )
    losses = []
    for each in (config, plain):
        trainer = make_trainer(each, mesh_of(each))
        placed = jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes["params"])
        losses.append(trainer.evaluate(jax.device_put(stored_params(each), placed), tokens_of(each)))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    prompt = np.arange(3, dtype=np.int32)
    texts = [sample_tokens(each, stored_params(each), prompt, 3, temperature=0, seed=0) for each in (config, plain)]
    np.testing.assert_array_equal(*texts)


def test_one_forward_one_backward_keeps_less_than_gpipe():
    """Of 8 microbatches at most 2 on 2 stages, whatever else the step needs."""
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
    check_same_run(dataclasses.replace(even, mesh=Mesh(data=2, expert=2)), tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(uneven))
    check_same_run(uneven, tmp_path)
    with pytest.raises(CheckpointError, match=r"^mesh\.pipeline=1 .* order of mesh\.pipeline=2 with .*: use"):
        check_same_run(dataclasses.replace(uneven, mesh=Mesh(data=2, expert=2)), tmp_path)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.pipeline=4 needs as many .* has 2 .*use mesh\.pipeline=2 or less"):
        Stages.of(small_config(1, 1, pipeline=4, every=1))


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pass_of_the_table_runs_once(name):
    """Each forward and backward pass of a microbatch through a chunk, alone or beside another; the ends once each."""
    config = config_of((2, 1, 2), "tied", 4, PIPELINES[name])
    plan = make_plan(config, mesh_of(config))
    turns, chunks = plan.turns, plan.table.chunks
    count = {scope.rsplit("_", 1)[0]: 0 for scope in turns}
    for scope, runs in turns.items():
        count[scope.rsplit("_", 1)[0]] += int(runs.sum())
    pairs = count.get("pass_together", 0)
    assert count["pass_forward"] + pairs == count["pass_backward"] + pairs == 4 * 2 * chunks
    assert [int(turns[f"pass_{end}"].sum()) for end in ("embed", "head", "embed_back")] == [4, 4, 4]
    assert (pairs > 0) == plan.has_pairs
    assert count.get("pass_weight", 0) == (4 * 2 * chunks if plan.table.split_weight_grad else 0)
