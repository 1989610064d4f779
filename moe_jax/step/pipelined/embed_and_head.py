"""The model before the lowest and after the highest block: embedding, last norm and head.

b sequences of one microbatch on this device, N local tokens of each, D model width.
"""

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from moe_jax.models.head import LossTerms
from moe_jax.models.transformer import ComputeConfig, embed
from moe_jax.parallel.sequence_shards import LocalTokens
from moe_jax.parallel.trees import Tree
from moe_jax.schedule.actions import NO_BLOCK, Action
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.scan_residuals import BlockConsts
from moe_jax.step.scheduled.step_dims import StepDims


def embedded(params: Tree, tokens: LocalTokens, model: ModelConfig, compute: ComputeConfig) -> jax.Array:
    """Return the residual stream before the lowest block."""
    return embed(params["embedding"], tokens.input_Bn, model, compute)


def embedding_gradient(
    params: Tree, tokens: LocalTokens, dx_bND: jax.Array, model: ModelConfig, compute: ComputeConfig
) -> jax.Array:
    """Return the gradient of the embedding from its use as the input layer."""
    _, pullback = jax.vjp(lambda embedding: embed(embedding, tokens.input_Bn, model, compute), params["embedding"])
    return pullback(dx_bND)[0]


def share_of_loss(dims: StepDims, params: Tree, x_bND: jax.Array, tokens: LocalTokens) -> LossTerms:
    """Return this device's share of the terms of the head's loss."""
    tasks = _tasks(dims, params, x_bND, tokens)
    for r in range(dims.microbatches):
        tasks.forward(Action("F", "head", NO_BLOCK, r))
    return tasks.losses


def head_gradients(
    dims: StepDims, params: Tree, x_bND: jax.Array, tokens: LocalTokens
) -> tuple[LossTerms, jax.Array, Tree]:
    """Return this device's share of the terms of the head's loss, and the loss's gradients with respect to the residual
    stream and the head's parameters.

    Forward and backward alternate part by part, so only one part's logits are in memory at a time.
    """
    tasks = _tasks(dims, params, x_bND, tokens)
    for part in range(dims.shape.backward.microbatches):
        back = Action("B", "head", NO_BLOCK, part)
        for r in dims.microbatches_of(back):
            tasks.forward(Action("F", "head", NO_BLOCK, r))
        tasks.backward(back)
        if dims.shape.split_weight_grad:
            tasks.weights(back._replace(direction="W"))
    dx_bND = jnp.concatenate([tasks.dx[r] for r in range(dims.microbatches)])
    return tasks.losses, dx_bND, tasks.pullbacks.grads["head", NO_BLOCK]


def _tasks(dims: StepDims, params: Tree, x_bND: jax.Array, tokens: LocalTokens) -> Tasks:
    tasks = Tasks(dims, params, BlockConsts({}), tokens)
    tasks.x = dict(enumerate(jnp.split(x_bND, dims.microbatches)))
    return tasks
