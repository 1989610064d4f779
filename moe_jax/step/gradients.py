"""Gradients of a step: of this device's parts of the batch, in the run's own order, summed over devices.

B sequences of this device, in A accumulated parts of b; N tokens of a sequence and N1 = N + 1; M blocks with experts,
E experts.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.models.gates.seen import When
from moe_jax.models.transformer import Computation
from moe_jax.parallel.grad_sync import sync_gradients
from moe_jax.parallel.ordering import after_all
from moe_jax.step.losses import Parts, local_objective
from moe_jax.step.pipelined import build as pipeline
from moe_jax.step.pipelined.executor import Stage
from moe_jax.step.pipelined.gradients import pipelined_gradients
from moe_jax.step.scheduled.build import Plan, make_plan, scheduled_gradients


def in_parts(token_BN1: jax.Array, config: Config) -> jax.Array:
    """This device's sequences as `train.grad_accumulation` parts [A, b, N1]."""
    return token_BN1.reshape(config.train.grad_accumulation, -1, token_BN1.shape[-1])


def plan_of(config: Config, mesh: Mesh) -> Plan | pipeline.Plan | None:
    """In which order a step's tasks run; None: autodiff's and the compiler's. Raises ScheduleError or ConfigError."""
    if config.step_kind == "pipelined":
        return pipeline.make_plan(config, mesh)
    return None if config.step_kind == "plain" else make_plan(config, mesh)


def gradients_of(
    params: Any,
    token_BN1: jax.Array,
    config: Config,
    how: Computation,
    global_tokens: int,
    specs: Any,
    cuts: Any,
    plan: Plan | pipeline.Plan | None,
    step: jax.Array | None = None,
    slot_ME: jax.Array | None = None,
) -> tuple[Any, Parts]:
    """Gradients summed over devices, and this device's parts, of `train.grad_accumulation` parts of the batch.

    Of what `cuts` cut a device gets the sum of its own part. Parts of the batch run one after another, if not in a
    pipeline, and devices are summed with the last, or with each (`optimizer.zero=2`). The load-balance loss looks at
    one part's tokens at a time, and the parts' losses are averaged. Gates draw at random in a `step` only. `slot_ME`:
    where experts lie (None: in their order).
    """
    count = config.train.grad_accumulation
    if isinstance(plan, pipeline.Plan):
        stage = Stage(params, token_BN1, config, how, global_tokens, plan, When(step), slot_ME)
        return pipelined_gradients(stage, specs, cuts)
    scheduled = functools.partial(
        scheduled_gradients, params, config=config, how=how, global_tokens=global_tokens, slot_ME=slot_ME
    )

    def own(token_bN1: jax.Array, part: jax.Array | int) -> tuple[Any, Parts]:
        """Of this device."""
        when = When(step, part, count)
        if plan is not None:
            return scheduled(token_bN1, plan=plan.without_reductions(), when=when)
        objective = functools.partial(local_objective, slot_ME=slot_ME)
        return jax.grad(objective, has_aux=True)(params, token_bN1, config.model, how, global_tokens, when)

    def summed(token_bN1: jax.Array, part: jax.Array | int) -> tuple[Any, Parts]:
        """Over devices."""
        if plan is not None:
            return scheduled(token_bN1, plan=plan, when=When(step, part, count))
        grads, parts = own(token_bN1, part)
        return sync_gradients(grads, specs, cuts, how.platform), parts

    part_AbN1 = in_parts(token_BN1, config)
    if count == 1:
        return summed(part_AbN1[0], 0)
    if config.optimizer.zero == 2:
        return _total(summed, part_AbN1)
    if plan is None:
        grads, parts = _total(own, part_AbN1)
        return sync_gradients(grads, specs, cuts, how.platform), parts
    earlier, parts_before = _total(own, part_AbN1[:-1])
    last_bN1 = part_AbN1[-1]
    if how.platform == "cpu":  # whose collectives would run concurrently with those of the loop: see measure/races.py
        last_bN1 = after_all(last_bN1, jax.tree.leaves(earlier), how.platform)
    grads, parts = scheduled(last_bN1, plan=plan, earlier=earlier, when=When(step, count - 1, count))
    return grads, _added(parts_before, parts)


def _total(of_part: Callable[[jax.Array, jax.Array | int], Any], part_AbN1: jax.Array) -> Any:
    """Of all parts, one after another."""
    zeros = optax.tree_utils.tree_zeros_like(jax.eval_shape(of_part, part_AbN1[0], 0))

    def add(total: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return _added(total, of_part(*part)), None

    return jax.lax.scan(add, zeros, (part_AbN1, jnp.arange(len(part_AbN1))))[0]


def _added(some: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, some, others)
