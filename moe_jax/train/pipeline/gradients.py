"""The gradients and the loss of a pipelined step: a loop over the ticks of a table."""

from collections.abc import Callable
from typing import Any

import jax

from moe_jax.config import Config
from moe_jax.models.gates.seen import EVALUATION, When
from moe_jax.models.transformer import Computation
from moe_jax.parallel.grad_sync import sync_gradients
from moe_jax.parallel.pipeline import stage, sum_over_stages
from moe_jax.train.objective import Parts
from moe_jax.train.pipeline.blocks import like_parameters
from moe_jax.train.pipeline.plan import Plan
from moe_jax.train.pipeline.rows import Row
from moe_jax.train.pipeline.stage import Stage, State

Tree = Any


def pipelined_gradients(
    params: Tree,
    token_BN1: jax.Array,
    config: Config,
    how: Computation,
    global_tokens: int,
    specs: Tree,
    cuts: Tree,
    plan: Plan,
    when: When = EVALUATION,
    slot_ME: jax.Array | None = None,
) -> tuple[Tree, Parts]:
    """Gradients of the objective, summed over devices, and this device's share of its parts, summed over stages.

    Of what `cuts` cut a device gets the sum of its own part. The parts of `train.grad_accumulation` are the pipeline's
    microbatches: each fills slots and is balanced by itself. `slot_ME`: where experts lie (None: in their order).
    """
    own = Stage(params, token_BN1, config, how, global_tokens, plan, when, slot_ME)
    state = _walk(own.tick, own.first_state(), own.rows)
    return sync_gradients(like_parameters(state.grads), specs, cuts, how.platform), sum_over_stages(state.parts)


def pipelined_loss(
    params: Tree,
    token_BN1: jax.Array,
    config: Config,
    how: Computation,
    global_tokens: int,
    plan: Plan,
    slot_ME: jax.Array | None = None,
) -> jax.Array:
    """This device's share of the cross-entropy, summed over stages; nothing is kept."""
    own = Stage(params, token_BN1, config, how, global_tokens, plan, slot_ME=slot_ME)
    state = _walk(own.forward_tick, own.first_state(backward=False), plan.forward_rows())
    return sum_over_stages(state.parts.cross_entropy)


def _walk(tick: Callable[[State, Row], State], state: State, rows: Row) -> State:
    """One tick after another, each by this stage's own row."""
    own_rows = jax.tree.map(lambda x: jax.numpy.asarray(x)[:, stage()], rows)
    return jax.lax.scan(lambda state, row: (tick(state, row), None), state, own_rows)[0]
