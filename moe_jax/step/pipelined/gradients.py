"""The gradients and the loss of a pipelined step: a loop over the ticks of a table."""

from collections.abc import Callable
from typing import Any

import jax

from moe_jax.parallel.grad_sync import sync_gradients
from moe_jax.parallel.pipeline import stage, sum_over_stages
from moe_jax.step.losses import Parts
from moe_jax.step.pipelined.executor import Stage, State
from moe_jax.step.pipelined.stage_params import like_parameters
from moe_jax.step.pipelined.tick_table import Row

Tree = Any


def pipelined_gradients(own: Stage, specs: Tree, cuts: Tree) -> tuple[Tree, Parts]:
    """Gradients of the objective, summed over devices, and this device's share of its parts, summed over stages.

    Of what `cuts` cut a device gets the sum of its own part. The parts of `train.grad_accumulation` are the pipeline's
    microbatches: each fills slots and is balanced by itself.
    """
    state = _walk(own.tick, own.first_state(), own.rows)
    grads = sync_gradients(like_parameters(state.grads), specs, cuts, own.how.platform)
    return grads, sum_over_stages(state.parts)


def pipelined_loss(own: Stage) -> jax.Array:
    """This device's share of the cross-entropy, summed over stages; nothing is kept."""
    state = _walk(own.forward_tick, own.first_state(backward=False), own.plan.forward_rows())
    return sum_over_stages(state.parts.cross_entropy)


def _walk(tick: Callable[[State, Row], State], state: State, rows: Row) -> State:
    """One tick after another, each by this stage's own row."""
    own_rows = jax.tree.map(lambda x: jax.numpy.asarray(x)[:, stage()], rows)
    return jax.lax.scan(lambda state, row: (tick(state, row), None), state, own_rows)[0]
