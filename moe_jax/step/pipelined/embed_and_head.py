"""The model before the lowest and after the highest block: embedding, last norm, head, and multi-token prediction.

The block of multi-token prediction runs forward and backward in the head's pass, so its activations need no slots.

b sequences of one microbatch on this device, N local tokens of each, D model width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from moe_jax.models.head import LossTerms, no_loss
from moe_jax.models.transformer import ComputeConfig, embed
from moe_jax.parallel.sequence_shards import LocalTokens
from moe_jax.parallel.trees import Tree
from moe_jax.schedule.actions import NO_BLOCK, Action
from moe_jax.step.losses import ObjectiveParts, parts_of
from moe_jax.step.pipelined.stage_inputs import MTPBlock
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop import run
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
    """Return this device's share of the terms of the head's loss, without multi-token prediction."""
    tasks = _tasks(dims, params, x_bND, tokens)
    with_mtp = tasks.heads.losses
    tasks.heads.without_mtp()
    for r in range(dims.microbatches):
        tasks.forward(Action("F", "head", NO_BLOCK, r))
    return tasks.heads.losses._replace(mtp_loss=with_mtp.mtp_loss)


class HeadGradients(NamedTuple):
    """The results of the head's pass."""

    loss: LossTerms  # this device's share
    dx_bND: jax.Array  # gradient of the residual stream after the decoder's last block
    grads: Tree  # of the parameters that all stages have
    mtp: list[Tree]  # of the block of multi-token prediction, if there is one
    mtp_parts: ObjectiveParts | None  # terms of the objective from its router; None without experts
    mtp_max_logit_lH: jax.Array | None = None  # the largest logits of its attention, if they are asked for: one row


def head_gradients(dims: StepDims, params: Tree, x_bND: jax.Array, tokens: LocalTokens) -> HeadGradients:
    """Return this device's share of the terms of the head's loss, and the loss's gradients.

    Forward and backward alternate part by part, so only one part's logits are in memory at a time.
    """
    tasks = _tasks(dims, params, x_bND, tokens)
    _run_head(dims, tasks)
    return HeadGradients(tasks.heads.losses, _joined(dims, tasks.dx), tasks.pullbacks.grads["head", NO_BLOCK], [], None)


def head_gradients_with_mtp(
    dims: StepDims, params: Tree, x_bND: jax.Array, tokens: LocalTokens, mtp: MTPBlock
) -> HeadGradients:
    """Return what `head_gradients` does for a loss with multi-token prediction, whose block runs forward before the
    head, and backward after it. `dims` are those of its block.
    """
    model = dims.config.model
    tasks = Tasks(dims, params, mtp.consts, tokens, mtp=mtp.inputs)
    tasks.x = dict(enumerate(jnp.split(x_bND, dims.microbatches)))
    sums = GradientReducer.of_device(tasks)

    def next_embeddings(embedding: jax.Array) -> list[jax.Array]:
        parts = mtp.inputs.parts(dims.microbatches)
        return [embed(embedding, part.next_Bn, model, dims.compute) for part in parts]

    embeddings, pullback = jax.vjp(next_embeddings, params["embedding"])
    tasks.mtp_embedding = dict(enumerate(embeddings))
    run(mtp.orders.forward, tasks, sums)
    _run_head(dims, tasks)
    run([*mtp.orders.backward, *mtp.orders.weight], tasks, sums)
    (of_embedding,) = pullback([tasks.d_mtp_embedding[r] for r in range(dims.microbatches)])
    grads = dict(tasks.pullbacks.grads["head", NO_BLOCK])
    grads["norm"] += tasks.pullbacks.grads["attend", 0]["last_norm"]
    grads["embedding"] = grads.get("embedding", 0) + of_embedding
    parts, stats = None, sums.stats()
    if stats is not None:
        parts = parts_of(no_loss(tasks.heads.form), stats, sums.count_ME, dims.routed_tokens, model.moe)
    max_logit_lH = tasks.max_logit_LH()
    return HeadGradients(tasks.heads.losses, _joined(dims, tasks.dx), grads, [sums.own(1)], parts, max_logit_lH)


def _run_head(dims: StepDims, tasks: Tasks) -> None:
    for part in range(dims.shape.backward.microbatches):
        back = Action("B", "head", NO_BLOCK, part)
        for r in dims.microbatches_of(back):
            tasks.forward(Action("F", "head", NO_BLOCK, r))
        tasks.backward(back)
        if dims.shape.split_weight_grad:
            tasks.weights(back._replace(direction="W"))


def _joined(dims: StepDims, parts: dict[int, jax.Array]) -> jax.Array:
    return jnp.concatenate([parts[r] for r in range(dims.microbatches)])


def _tasks(dims: StepDims, params: Tree, x_bND: jax.Array, tokens: LocalTokens) -> Tasks:
    tasks = Tasks(dims, params, BlockConsts({}), tokens)
    tasks.x = dict(enumerate(jnp.split(x_bND, dims.microbatches)))
    return tasks
