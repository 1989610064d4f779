"""The plain training step: the code that each device runs inside `shard_map`. Read this file first.

A step computes the loss of this device's tokens, differentiates it, sums the gradients over devices, clips them and
updates the parameters. The two other kinds of step (`kinds.py`) replace `gradients`, and pipelines also `evaluate`, by
functions that compute the same values in a different order. So this file is also their specification.

The mesh has five axes. Tokens are sharded over data, context, expert and tensor ranks, experts over expert ranks, heads
and hidden widths over tensor ranks, and blocks over pipeline stages. `forward` sends rows to experts and back, and
gathers what tensor and context ranks need. `sync_gradients` sums each gradient over the axes on which its parameter is
replicated. `sum_over_batch` sums over all ranks that have different tokens.

B sequences of this device, in A parts of b sequences for gradient accumulation; N tokens of each sequence and N1 = N +
1; D model width; M blocks with experts, E experts.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from moe_jax.models.gates.inputs import BatchPart
from moe_jax.models.head import LossForm
from moe_jax.models.mtp import decoder_loss, mtp_scale
from moe_jax.models.transformer import forward
from moe_jax.parallel import background
from moe_jax.parallel.grad_sync import global_norm, sum_over_batch, sync_gradients
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Grads, Params
from moe_jax.step import fault_injection
from moe_jax.step.context import State, StepContext, StepInputs
from moe_jax.step.expert_placement import experts_here, slots_of, with_copies_summed, with_load_added
from moe_jax.step.losses import Metrics, ObjectiveParts, metrics_of, parts_of, with_max_logits
from moe_jax.step.moving_average import with_step_added
from moe_jax.step.optimizer import clip_factor, learning_rate, updates_done, with_counts_unless_bad
from moe_jax.step.optimizers.protocol import unless_bad
from moe_jax.step.qk_clip import max_over_batch, with_clipped_heads
from moe_jax.step.router_bias import with_moved_biases

ROUTED = "routed_experts"  # of metrics: [M, G, k]; E: of no expert
Gradients = Callable[[Params, StepInputs, StepContext], tuple[Grads, ObjectiveParts]]
_Sum = TypeVar("_Sum")


def objective(params: Params, inputs: StepInputs, context: StepContext) -> tuple[Float[Array, ""], ObjectiveParts]:
    """Return this device's share of the loss, and the share of each term of it.

    With `optimizer.zero=3` blocks are gathered one by one (`models/transformer.py`); the embedding and the head in
    `params` are whole.

    The loss is cross-entropy + the weighted z-loss of the logits + the weighted loss of multi-token prediction
    (`models/mtp.py`) + weighted load-balance and router z losses. The shares of all devices add up to the loss of the
    global batch, and their gradients to its gradient. So no sum over devices is differentiated, only exchanges and the
    transfers between tensor and context ranks.
    """
    model, compute, tokens = context.config.model, context.compute, inputs.routed_tokens(context)
    input_Bn, target_Bn = inputs.local_tokens()  # each context and tensor rank has n of N tokens
    router_inputs, document_BN, mtp = inputs.router_inputs(context), inputs.document_BN(context), inputs.mtp(context)
    x_BnD, stats, max_logit_LH, mtp_BnD = forward(
        *(params, input_Bn, model, compute, router_inputs, inputs.slot_ME, document_BN, context.block_gathers),
        next_BN=None if mtp is None else mtp.next_Bn,
    )
    head = decoder_loss(
        *(params, x_BnD, target_Bn, inputs.loss_divisor(context), model, compute.loss_chunk),
        *(LossForm.of(context.config), mtp_BnD, mtp),
    )
    count_ME = None if stats is None else sum_over_batch(stats.count_E)
    parts = parts_of(head.terms, stats, count_ME, tokens, model.moe)
    parts = with_max_logits(parts, max_logit_LH, inputs.batch_part.part, inputs.batch_part.parts)
    return head.total + parts.auxiliary(model.moe), parts


def gradients(params: Params, inputs: StepInputs, context: StepContext) -> tuple[Grads, ObjectiveParts]:
    """Return the gradients of the objective, summed over devices, and this device's share of each term.

    The parts of a batch (`train.grad_accumulation`) run one after another; each has its own expert capacity and
    load-balance loss. Gradients are summed over devices after the last part, or after each part with
    `optimizer.zero` above 1. If `context.shard_specs` shards an array, each device gets the sum of its own shard.
    """
    count = context.config.train.grad_accumulation
    params = context.with_whole_ends(params)
    specs, shard_specs = context.unsummed()

    def local(token_bN1: jax.Array, number: jax.Array | int) -> tuple[Grads, ObjectiveParts]:
        return jax.grad(objective, has_aux=True)(params, inputs.part(token_bN1, number, count), context)

    def summed(token_bN1: jax.Array, number: jax.Array | int) -> tuple[Grads, ObjectiveParts]:
        grads, parts = local(token_bN1, number)
        if context.compute.platform == "cpu":
            grads = _waiting_for_blocks(grads)
        return sync_gradients(grads, specs, shard_specs, context.compute.platform), parts

    part_AbN1 = inputs.in_parts(count)
    if count == 1:
        return summed(part_AbN1[0], 0)
    if context.config.optimizer.zero >= 2:
        return accumulate(summed, part_AbN1)
    grads, parts = accumulate(local, part_AbN1)
    return sync_gradients(grads, specs, shard_specs, context.compute.platform), parts


def _waiting_for_blocks(grads: Grads) -> Grads:
    """Return gradients that exist only after the loops over blocks have ended, for CPUs (`measure/races.py`).

    The embedding's gradient is the last one. The sum of another one, such as the last norm's, could otherwise run while
    a block communicates.
    """
    last = grads["embedding"]
    return {name: grad if grad is last else depend_on(grad, last, "cpu") for name, grad in grads.items()}


def evaluate(params: Params, inputs: StepInputs, context: StepContext) -> Float[Array, ""]:
    """Return this device's share of the mean nats per token of a batch, without an update."""
    count = context.config.train.grad_accumulation
    params = context.with_whole_ends(params)

    def share(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, token_bN1 = part
        return objective(params, inputs.part(token_bN1, number, count), context)[1].cross_entropy

    part_AbN1 = inputs.in_parts(count)
    return jax.lax.map(share, (jnp.arange(count), part_AbN1)).sum()


def train_step(
    state: State,
    token_BN1: Int[Array, "B N1"],
    max_loss: Float[Array, ""] | None,  # None unless train.skip_spikes
    replayed_LGk: Int[Array, "L G k"] | None,  # None unless train.replay_routing
    context: StepContext,
    gradients: Gradients,
) -> tuple[State, Metrics]:
    """Return the state after a step, and its metrics; with train.record_routing the experts of all tokens among them.

    A step is bad if its loss or gradient norm is not finite, or if its loss is above `max_loss`. A bad step only
    increments the step counter.
    """
    background.new_program()  # numbers the collectives of CPU threads from 0
    config, compute = context.config, context.compute
    inputs = StepInputs.of(token_BN1, context, BatchPart(state["step"]), slots_of(state))
    inputs = inputs._replace(replayed_LGk=replayed_LGk)
    params = fault_injection.inject_faults(state["params"], state["step"])  # unchanged outside of tests
    grads, parts = gradients(params, inputs, context)
    grads = with_copies_summed(grads, inputs.slot_ME, context)  # copies of experts, migration.replicas
    norm = global_norm(grads, context.grad_specs, compute.platform, experts_here(inputs.slot_ME, context))
    if compute.platform != "gpu":  # on CPUs and TPUs, where a small sum is synchronous, last: nothing waits for it
        parts = depend_on(parts, norm, compute.platform)
    parts, max_logit_LH = max_over_batch(parts, context)  # optimizer.qk_clip
    total = sum_over_batch(parts)
    rate = learning_rate(config)(updates_done(state["optimizer"]))
    scale = mtp_scale(config.train, state["step"]) if config.model.has_mtp else 0.0
    metrics = metrics_of(total, norm, rate, config.model.moe, config.train.z_loss_multiplier, scale)
    if total.source_loss_S is not None:
        metrics["source_loss"] = inputs.mean_by_source(total.source_loss_S)
    if total.expert_MGk is not None:
        metrics[ROUTED] = total.expert_MGk - 1
    if max_logit_LH is not None:
        metrics["max_attention_logit"] = max_logit_LH.max()
    is_good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    if max_loss is not None:
        is_good &= metrics["loss"] <= max_loss
    with jax.named_scope("optimizer"):
        factor = clip_factor(norm, config.optimizer.clip_norm)
        params = context.own_shards(state["params"])
        clipped = jax.tree.map(lambda g: g * factor, grads)
        updates, moments = context.optimizer.update(clipped, state["optimizer"], params, is_good=is_good)
        learned = with_clipped_heads(optax.apply_updates(params, updates), max_logit_LH, context)
        learned = with_moved_biases(learned, total.count_ME, context.stages, config.model.moe.bias_update_rate)
        learned = unless_bad(is_good, learned, params)
    new_state = {
        "step": state["step"] + 1,
        "params": context.as_stored(learned),
        "optimizer": with_counts_unless_bad(is_good, moments, state["optimizer"]),
        **with_load_added(state, metrics, is_good),
        **with_step_added(state, learned, is_good, config.optimizer.ema_decay),
    }
    return new_state, metrics | {"bad_step": 1 - is_good.astype(jnp.int32)}


def accumulate(of_part: Callable[[jax.Array, jax.Array | int], _Sum], part_AbN1: Int[Array, "A b N1"]) -> _Sum:
    """Return the sum of `of_part(tokens, number)` over the parts of a batch, computed one after another."""
    numbers = jnp.arange(len(part_AbN1))
    of_part = jax.jit(of_part, inline=True)  # traced once for its shapes and the loop
    zeros = optax.tree_utils.tree_zeros_like(jax.eval_shape(of_part, part_AbN1[0], numbers[0]))

    def add(total: _Sum, part: tuple[jax.Array, jax.Array]) -> tuple[_Sum, None]:
        return jax.tree.map(jnp.add, total, of_part(*part)), None

    return jax.lax.scan(add, zeros, (part_AbN1, numbers))[0]
