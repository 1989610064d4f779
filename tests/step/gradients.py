"""Gradients of a real step, and of its slow reference on one device."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moe_jax.config import Config, ModelConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.models.gates.inputs import BatchPart
from moe_jax.models.parameters import init_params, stored
from moe_jax.parallel import background
from moe_jax.parallel.grad_sync import global_norm, sum_over_batch
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.kinds import step_kind
from moe_jax.step.losses import ObjectiveParts
from moe_jax.step.trainer import Trainer
from tests import references
from tests.compiled import run_checked
from tests.numpy_gradients import value_and_grad
from tests.small import first_params, small_config, tokens_of


class Result(NamedTuple):
    """What a step computes before its optimizer runs."""

    loss: Any
    grads: Any
    norm: Any
    parts: ObjectiveParts  # summed over devices


def mesh_of(config: Config) -> jax.sharding.Mesh:
    mesh = make_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.sizes.values())])
    background.connect(mesh)
    return mesh


def sharded_gradients(config: Config, params: Any, token_BN1: np.ndarray, step: int | None = None) -> Result:
    """On the config's mesh, by a step of its kind. Gates draw random numbers in a `step`."""
    mesh = mesh_of(config)
    context, kind = StepContext.of(config, mesh), step_kind(config, mesh)
    specs, batch_part = context.specs, BatchPart(None if step is None else jnp.int32(step))
    assert token_BN1[:, 1:].size == context.global_tokens

    def body(params: Any, token_bN1: jax.Array) -> Result:
        grads, parts = kind.gradients(params, StepInputs.of(token_bN1, context, batch_part), context)
        total = sum_over_batch(parts)
        loss = total.head_loss(config.train.z_loss_multiplier) + total.auxiliary(config.model.moe)
        return Result(loss, grads, global_norm(grads, specs, "cpu"), total)

    everywhere = PartitionSpec()
    out = Result(everywhere, specs, everywhere, everywhere)  # type: ignore[arg-type]
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=out, check_vma=False))
    if context.compute.platform != "cpu":  # what others run, small enough here to run one operation after another
        return jax.device_get(run(params, token_BN1))
    return run_checked(run, params, token_BN1)


@functools.cache
def reference_gradients(
    model: ModelConfig,
    sources: int,
    batch_size: int,
    seq_len: int,
    buffer: tuple[float, int] | None,
    tensor: int,
    context: int,
    seed_and_step: tuple[int, int] | None = None,
) -> tuple[Any, ObjectiveParts, Any]:
    """Loss, its parts and gradients of the reference."""
    config = small_config(1, 1, batch_size=batch_size, seq_len=seq_len)
    config = dataclasses.replace(config, model=model)
    run = value_and_grad(references.objective)
    (loss, parts), grads = run(
        first_params(model), tokens_of(config), model, sources, buffer, tensor, context, seed_and_step
    )
    return loss, ObjectiveParts(**parts), grads


def first_state(config: Config, trainer: Trainer) -> Any:
    """What `trainer.init()` returns, to the last digits; its program takes seconds to compile for each model.

    Experts that have places begin with it.
    """
    if config.migration.enabled:
        return trainer.init()
    params = init_params(config.model, config.train.seed)
    return state_with(jax.device_get(params), config, trainer)


def state_with(params: Any, config: Config, trainer: Trainer, step: int = 0) -> Any:
    """A state with these parameters, of which nothing is learned yet, on the devices of a trainer."""
    shapes = trainer.state_shapes
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes["optimizer"])
    if config.mesh.pipeline > 1:
        params = jax.device_get(jax.jit(stored, static_argnums=1)(params, Stages.of(config)))
    host = {"step": np.int32(step), "params": params, "optimizer": zeros}
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), host, shapes)


def assert_equals_reference(config: Config, step: int | None = None) -> None:
    """Loss, every gradient, the auxiliary losses and what the routers counted."""
    assert_is_reference(config, sharded_gradients(config, first_params(config.model), tokens_of(config), step), step)


def assert_is_reference(config: Config, result: Result, step: int | None = None) -> None:
    """The same for a result that exists."""
    mesh, moe = f"mesh {config.mesh.sizes}", config.model.moe
    sources, batch_size, seq_len = config.mesh.data * config.mesh.expert, config.train.batch_size, config.data.seq_len
    buffer = None
    if moe.sends_sized_rows and config.exchange.rank_capacity_factor is not None:
        buffer = config.exchange.rank_capacity_factor, config.mesh.expert_ranks(config.mesh.sizes)
    loss, parts, grads = reference_gradients(
        *(config.model, sources, batch_size, seq_len, buffer, config.mesh.tensor, config.mesh.context),
        None if step is None else (config.train.seed, step),
    )
    np.testing.assert_array_equal(result.parts.count_ME, parts.count_ME, err_msg=f"pairs per expert, {mesh}")
    np.testing.assert_array_equal(result.parts.num_dropped_M, parts.num_dropped_M, err_msg=mesh)
    assert result.parts.z_loss is None, "its weight is 0"
    for name in ("cross_entropy", "load_balance_loss", "router_z_loss"):
        value, expected = getattr(result.parts, name), getattr(parts, name)
        np.testing.assert_allclose(value, expected, rtol=5e-6, err_msg=f"{name}, {mesh}")
    np.testing.assert_allclose(result.loss, loss, rtol=2e-6, err_msg=mesh)
    chex.assert_trees_all_close(result.grads, grads, rtol=2e-4, atol=2e-6, custom_message=mesh)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
    np.testing.assert_allclose(result.norm, np.linalg.norm(flat), rtol=2e-5, err_msg=mesh)
    pairs = batch_size * seq_len * moe.top_k
    if moe.gate not in ("noisy", "expert_choice", "softmoe"):
        counted = result.parts.count_ME.sum(axis=-1)
        assert (counted == pairs).all(), f"every (token, choice) pair is counted once, {mesh}"
    if moe.capacity_factor is None and buffer is None:
        assert not result.parts.num_dropped_M.any(), mesh
