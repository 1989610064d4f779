"""The sharded step against the single-device, loop-over-experts reference: values and every gradient."""

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import Config, Data, Mesh, Model, MoE, Train
from moe_jax.models.parameters import param_dims
from moe_jax.models.transformer import Computation
from moe_jax.parallel.grad_sync import global_norm, sum_over_batch, sync_gradients
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC, partitions
from moe_jax.train.step import local_gradients, make_trainer
from tests import references

MESHES = [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2)]


def small_config(data: int, expert: int, *, model: dict | None = None, **moe) -> Config:
    """Two blocks (dense, then experts), grouped-query attention, 8 sequences of 12 tokens."""
    moe = {"num_experts": 8, "top_k": 2, "hidden_dim": 12, "every": 2, "capacity_factor": 1.0} | moe
    shape = {"vocab_size": 32, "d_model": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}
    return Config(
        model=Model(**(shape | (model or {})), moe=MoE(**moe)),
        mesh=Mesh(data=data, expert=expert),
        data=Data(seq_len=12),
        train=Train(batch_size=8, compute_dtype="float32"),
    )


def tokens_of(config: Config, seed: int = 0) -> np.ndarray:
    shape = (config.train.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(seed).integers(0, config.model.vocab_size, shape, dtype=np.int32)


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


def assert_equals_reference(config: Config) -> None:
    params = make_trainer(config, make_mesh(config.mesh, jax.devices()[: config.mesh.data * config.mesh.expert])).init()
    params = jax.device_get(params["params"])
    token_BN1 = tokens_of(config)
    loss, grads, norm, dropped, count_ME = sharded_gradients(config, params, token_BN1)
    sources = config.mesh.data * config.mesh.expert
    # not under jit: the reference decides with numpy which pairs are kept
    (expected_loss, expected_dropped), expected = jax.value_and_grad(references.objective, has_aux=True)(
        params, token_BN1, config.model, sources
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    chex.assert_trees_all_close(jax.device_get(grads), expected, rtol=2e-4, atol=2e-6)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(expected)])
    np.testing.assert_allclose(norm, np.linalg.norm(flat), rtol=2e-5)
    assert dropped == expected_dropped
    pairs = token_BN1[:, 1:].size * config.model.moe.top_k
    assert (count_ME.sum(axis=-1) == pairs).all(), "every (token, choice) pair is counted once"
    if config.model.moe.capacity_factor is None:
        assert dropped == 0


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("capacity_factor", [0.8, None])
@pytest.mark.parametrize(("data", "expert"), MESHES)
def test_loss_and_gradients_equal_the_reference(data, expert, capacity_factor, top_k, shared):
    assert_equals_reference(
        small_config(data, expert, capacity_factor=capacity_factor, top_k=top_k, num_shared_experts=shared)
    )
