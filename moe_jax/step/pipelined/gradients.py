"""Compute the gradients and the loss of a pipelined step: a scan over the ticks of a table."""

from collections.abc import Callable

import jax

from moe_jax.parallel.grad_sync import sync_gradients
from moe_jax.parallel.pipeline import stage, sum_over_stages
from moe_jax.parallel.trees import Grads, Params
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.losses import ObjectiveParts
from moe_jax.step.pipelined.build import PipelinedPlan
from moe_jax.step.pipelined.executor import PipelineStage, State
from moe_jax.step.pipelined.stage_params import stack_gradients
from moe_jax.step.pipelined.tick_table import TickRow


def pipelined_gradients(
    params: Params, inputs: StepInputs, context: StepContext, plan: PipelinedPlan
) -> tuple[Grads, ObjectiveParts]:
    """Compute the same values as `plain.gradients`, up to rounding; the terms of the objective are summed over stages.

    The parts of `train.grad_accumulation` are the pipeline's microbatches: each has its own expert capacity and
    load-balance loss.
    """
    own = PipelineStage(context.whole(params), inputs, context, plan)
    state = _walk(own.tick, own.first_state(), own.rows)
    grads = sync_gradients(stack_gradients(state.grads), context.specs, context.shard_specs, context.compute.platform)
    return grads, sum_over_stages(state.parts)


def pipelined_evaluation(params: Params, inputs: StepInputs, context: StepContext, plan: PipelinedPlan) -> jax.Array:
    """Compute the same value as `plain.evaluate`, summed over stages; nothing is saved for a backward pass."""
    own = PipelineStage(context.whole(params), inputs, context, plan.without_weight_passes())
    state = _walk(own.forward_tick, own.first_state(backward=False), plan.forward_rows())
    return sum_over_stages(state.parts.cross_entropy)


def _walk(tick: Callable[[State, TickRow], State], state: State, rows: TickRow) -> State:
    """Run all ticks in order, each with this stage's row of the table."""
    own_rows = jax.tree.map(lambda x: jax.numpy.asarray(x)[:, stage()], rows)
    return jax.lax.scan(lambda state, row: (tick(state, row), None), state, own_rows)[0]
