"""The sharded step against the single-device, loop-over-experts reference: values and every gradient."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import Config, Data, Mesh, Model, Optimizer, Schedule
from moe_jax.models.parameters import param_dims
from moe_jax.models.transformer import Computation
from moe_jax.parallel.grad_sync import global_norm, sum_over_batch, sync_gradients
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC, partitions
from moe_jax.train.step import local_gradients, make_trainer
from tests import references
from tests.small import first_params, small_config, tokens_of

MESHES = [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2)]


def sharded_gradients(config: Config, params, token_BN1):
    """Loss, gradients, norm and dropped pairs of the real step's parts, on the config's mesh."""
    devices = jax.devices()[: config.mesh.data * config.mesh.expert]
    mesh = make_mesh(config.mesh, devices)
    specs = partitions(param_dims(config.model))
    how = Computation.of(config, mesh)

    def body(params, token_bN1):
        grads, parts = local_gradients(params, token_bN1, config, how, token_BN1[:, 1:].size)
        grads = sync_gradients(grads, specs)
        total = sum_over_batch(parts)
        moe = config.model.moe
        loss = total.cross_entropy
        loss += moe.load_balance_weight * total.load_balance_loss + moe.router_z_weight * total.router_z_loss
        return loss, grads, global_norm(grads, specs), total.num_dropped, total.count_ME

    replicated = PartitionSpec()
    out = (replicated, specs, replicated, replicated, replicated)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=out, check_vma=False))
    return run(params, token_BN1)


@functools.cache
def reference_gradients(model: Model, sources: int):
    """Loss, dropped pairs and gradients of the twin. Not under jit: numpy decides which pairs are kept."""
    config = dataclasses.replace(small_config(1, 1), model=model)
    run = jax.value_and_grad(references.objective, has_aux=True)
    (loss, dropped), grads = run(first_params(model), tokens_of(config), model, sources)
    return loss, dropped, grads


def assert_equals_reference(config: Config) -> None:
    mesh = f"mesh (data={config.mesh.data}, expert={config.mesh.expert})"
    expected_loss, expected_dropped, expected = reference_gradients(config.model, config.mesh.data * config.mesh.expert)
    token_BN1 = tokens_of(config)
    loss, grads, norm, dropped, count_ME = sharded_gradients(config, first_params(config.model), token_BN1)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6, err_msg=mesh)
    chex.assert_trees_all_close(jax.device_get(grads), expected, rtol=2e-4, atol=2e-6, custom_message=mesh)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(expected)])
    np.testing.assert_allclose(norm, np.linalg.norm(flat), rtol=2e-5, err_msg=mesh)
    assert dropped == expected_dropped, mesh
    pairs = token_BN1[:, 1:].size * config.model.moe.top_k
    assert (count_ME.sum(axis=-1) == pairs).all(), f"every (token, choice) pair is counted once, {mesh}"
    if config.model.moe.capacity_factor is None:
        assert dropped == 0, mesh


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("capacity_factor", [0.8, None])
def test_loss_and_gradients_equal_the_reference(capacity_factor, top_k, shared):
    """One block, so that 60 programs compile in minutes; more blocks below."""
    moe = {"every": 1, "capacity_factor": capacity_factor, "top_k": top_k, "num_shared_experts": shared}
    for data, expert in MESHES:
        assert_equals_reference(small_config(data, expert, model={"num_layers": 1}, **moe))


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        ({"activation": "gelu", "tie_embeddings": True, "qk_norm": True}, {"gate": "sigmoid"}),
        ({"num_layers": 5}, {"first_dense_blocks": 1, "every": 2, "num_shared_experts": 2}),
        ({"num_layers": 3, "head_dim": 6}, {"every": 1, "normalize_weights": False, "routed_scale": 2.5}),
        ({}, {"order": "einsum"}),
        ({}, {"order": "einsum", "capacity_factor": None}),
        ({}, {"num_experts": 0}),
    ],
    ids=["gelu-tied-qknorm-sigmoid", "uneven-segments", "all-moe", "one-hot", "one-hot-dropless", "dense"],
)
def test_model_variants_equal_the_reference(model, moe):
    expert = 1 if moe.get("num_experts") == 0 else 4
    assert_equals_reference(small_config(8 // expert, expert, model=model, **moe))


def run_steps(config: Config, steps: int = 3):
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.data * config.mesh.expert])
    trainer = make_trainer(config, mesh)
    state, records = trainer.init(), []
    for seed in range(steps):
        state, metrics = trainer.step(state, tokens_of(config, seed))
        records.append(jax.device_get(metrics))
    return jax.device_get(state), records


def test_accumulated_parts_equal_the_whole_batch():
    """Without the load-balance loss, whose token counts are those of a part, cutting the batch changes nothing."""
    config = small_config(1, 2, capacity_factor=None, load_balance_weight=0.0)
    whole, records = run_steps(config)
    cut = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_accumulation=4))
    parts, cut_records = run_steps(cut)
    chex.assert_trees_all_close(parts["params"], whole["params"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose([r["loss"] for r in cut_records], [r["loss"] for r in records], rtol=1e-5)


@pytest.mark.parametrize("schedule", [{"remat": "dots"}, {"remat": "full"}, {"unroll": 2}])
def test_rematerialisation_and_unrolling_change_no_gradient(schedule):
    config = small_config(1, 2, model={"num_layers": 4}, every=1)
    other = dataclasses.replace(config, schedule=Schedule(**schedule))
    params = first_params(config.model)
    _, expected, *_ = sharded_gradients(config, params, tokens_of(config))
    _, grads, *_ = sharded_gradients(other, params, tokens_of(config))
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-7)


def test_rematerialisation_saves_memory():
    bytes_of = {}
    for remat in ("none", "dots", "full"):
        base = small_config(1, 1, model={"num_layers": 6, "d_model": 32}, every=1)
        config = dataclasses.replace(base, schedule=Schedule(remat=remat))
        trainer = make_trainer(config, make_mesh(Mesh(), jax.devices()[:1]))
        compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
        bytes_of[remat] = compiled.memory_analysis().temp_size_in_bytes
    assert bytes_of["full"] < bytes_of["dots"] < bytes_of["none"]
    assert bytes_of["full"] < 0.5 * bytes_of["none"]


def test_bfloat16_gradient_of_a_frequent_token_is_not_lost():
    """2,048 equal tokens pull at one row of the embedding: a sum in bfloat16 would stop growing early."""
    config = small_config(1, 1, num_experts=0, model={"num_layers": 1})
    config = dataclasses.replace(config, data=Data(seq_len=256))
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="bfloat16"))
    token_BN1 = np.full((8, 257), 3, np.int32)
    token_BN1[:, -1] = 5
    params = first_params(config.model)
    _, expected, *_ = sharded_gradients(config, params, token_BN1)
    _, grads, *_ = sharded_gradients(half, params, token_BN1)
    row, expected_row = grads["embedding"][3], expected["embedding"][3]
    np.testing.assert_allclose(row, expected_row, atol=0.05 * np.abs(expected_row).max())


def test_training_is_the_same_on_every_mesh_when_dropless():
    config = small_config(1, 1, capacity_factor=None)
    expected = [r["loss"] for r in run_steps(config)[1]]
    for data, expert in [(8, 1), (2, 4)]:
        losses = [r["loss"] for r in run_steps(dataclasses.replace(config, mesh=Mesh(data=data, expert=expert)))[1]]
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"mesh ({data}, {expert})")


def test_clipping_scales_the_whole_gradient_by_its_global_norm():
    """One SGD-like step: with AdamW the first update's size does not depend on the gradient's, so look at moments."""
    base = small_config(2, 4)
    moments = {}
    for clip in (None, 0.01):
        config = dataclasses.replace(base, optimizer=Optimizer(clip_norm=clip, warmup_steps=0))
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


def test_bfloat16_compute_stays_close_and_keeps_float32_parameters():
    config = small_config(1, 2)
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="bfloat16"))
    state, records = run_steps(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {np.dtype("float32")}
    np.testing.assert_allclose([r["loss"] for r in records], [r["loss"] for r in run_steps(config)[1]], rtol=0.02)
