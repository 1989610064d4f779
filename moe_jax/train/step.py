"""One optimiser step as one jitted `shard_map` program over the whole mesh.

B sequences of this device, in A accumulated parts of b; N tokens of a sequence and N1 = N + 1; M blocks with experts,
E experts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from moe_jax.config import Config
from moe_jax.models.gates.seen import When
from moe_jax.models.parameters import init_params, param_dims
from moe_jax.models.placement import by_slot, first_experts
from moe_jax.models.stages import stored, stored_shapes
from moe_jax.models.transformer import Computation
from moe_jax.parallel import background, zero
from moe_jax.parallel.grad_sync import global_norm, sum_over_batch, sync_gradients
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.ordering import after
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED, partitions, shardings
from moe_jax.schedule import schedule
from moe_jax.schedule.pipelines.table import Table
from moe_jax.schedule.xla_flags import compiler_options
from moe_jax.stages import Stages
from moe_jax.train import faults
from moe_jax.train.balance import with_moved_biases
from moe_jax.train.emit import Plan, make_plan, scheduled_gradients
from moe_jax.train.objective import Parts, local_objective
from moe_jax.train.optimizer import (
    clip_factor,
    learning_rate,
    make_optimizer,
    state_cuts,
    state_partitions,
    unless_bad,
    updates_done,
    with_counts_unless_bad,
)
from moe_jax.train.pipeline import plan as pipeline
from moe_jax.train.pipeline.gradients import pipelined_gradients, pipelined_loss
from moe_jax.train.pipeline.stage import Stage
from moe_jax.train.placement import experts_here, first_placement, slots_of, with_copies_summed

# Random numbers run once, and LLVM takes seconds to optimise them; the values are the same without.
_INIT_OPTIONS = {"cpu": {"xla_backend_optimization_level": 0}}

State = dict[str, Any]  # {"step": int32, "params": …, "optimizer": …}, and "placement" if experts migrate


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The programs of a run, all over the same mesh and state layout."""

    mesh: Mesh
    plan: Plan | pipeline.Plan | None  # None: autodiff's and the compiler's order
    state_shapes: State  # ShapeDtypeStructs that carry shardings
    param_shapes: Any  # of the parameters of a state without copies of experts, with shardings
    init: Wrapped  # () → State
    begin: Wrapped  # parameters like param_shapes (donated) → State
    step: Wrapped  # State (donated), batch, largest loss to learn from (left out: any) → State, metrics
    evaluate: Wrapped  # parameters, batch, where experts lie (None: in their order) → mean nats per token
    has_loss_bound: bool = False  # whether the step of a run gets its third argument

    def step_shapes(self, batch: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
        """Of the arguments of a run's step."""
        bound = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self.mesh, REPLICATED))
        return (self.state_shapes, batch, bound) if self.has_loss_bound else (self.state_shapes, batch)

    @property
    def schedule(self) -> schedule.Schedule | None:
        """Of a step without pipeline stages."""
        return self.plan.schedule if isinstance(self.plan, Plan) else None

    @property
    def table(self) -> Table | None:
        """Of a pipeline."""
        return self.plan.table if isinstance(self.plan, pipeline.Plan) else None


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Build the programs; nothing is compiled or allocated yet.

    Batches are int32 [train.batch_size, data.seq_len + 1], cut over the data and expert axes. A step whose loss or
    gradient norm is not finite, or whose loss is above its bound, is bad (metric `bad_step`): it counts as one, and
    changes nothing else of the state.
    """
    stages = Stages.of(config)
    dims, shapes = param_dims(config.model), stored_shapes(stages)
    optimizer, specs = make_optimizer(config, dims), partitions(dims, expert_axis(config.mesh))
    cuts = state_cuts(config, mesh)
    own_specs = zero.part_specs(cuts, specs)
    moments = state_partitions(optimizer, shapes, own_specs)
    layout = {"step": REPLICATED, "params": specs, "optimizer": moments}
    ranks = config.mesh.expert_ranks(mesh.shape)
    placement = functools.partial(first_placement, config.model, ranks, config.replicas)
    if config.migration.enabled:
        layout["placement"] = dict.fromkeys(jax.eval_shape(placement), REPLICATED)
    placed = shardings(mesh, layout)

    def begin(params: Any) -> State:
        where = {"placement": placement()} if config.migration.enabled else {}
        if config.replicas:
            params = by_slot(params, first_experts(config.model.moe.num_experts, ranks, config.replicas))
        return {"step": jnp.int32(0), "params": params, "optimizer": optimizer.init(params), **where}

    def init() -> State:
        return begin(stored(init_params(config.model, config.train.seed), stages))

    def with_shardings(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree, shardings)

    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    how = Computation.of(config, mesh)
    global_tokens = config.train.batch_size * config.data.seq_len

    plan = plan_of(config, mesh)
    if "background" in (how.exchange, config.exchange.reduction):
        background.connect(mesh)

    def step_here(state: State, token_BN1: jax.Array, most: jax.Array | None) -> tuple[State, dict[str, jax.Array]]:
        background.new_program()
        slot_ME = slots_of(state)
        seen = faults.struck(state["params"], state["step"])
        grads, parts = gradients_of(
            seen, token_BN1, config, how, global_tokens, specs, cuts, plan, state["step"], slot_ME
        )
        if config.replicas:
            grads = with_copies_summed(grads, slot_ME, stages, how.expert_axis)
        norm = global_norm(grads, own_specs, how.platform, experts_here(dims, slot_ME, stages, how.expert_axis))
        if how.platform == "cpu":  # where a sum keeps the thread that computes, until all devices have come
            parts = jax.tree.map(lambda part: after(part, norm, how.platform) if part.size else part, parts)
        total = sum_over_batch(parts)
        rate = learning_rate(config)(updates_done(state["optimizer"]))
        metrics = _metrics(total, norm, rate, config)
        is_good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        if most is not None:
            is_good &= metrics["loss"] <= most
        factor = clip_factor(norm, config.optimizer.clip_norm)
        params = zero.own_parts(cuts, state["params"])
        scaled = jax.tree.map(lambda g: g * factor, grads)
        updates, moments = optimizer.update(scaled, state["optimizer"], params, is_good=is_good)
        learned = optax.apply_updates(params, updates)
        learned = with_moved_biases(learned, total.count_ME, stages, config.model.moe.bias_update_rate)
        new_state = {
            "step": state["step"] + 1,
            "params": zero.gathered(cuts, unless_bad(is_good, learned, params), how.platform),
            "optimizer": with_counts_unless_bad(is_good, moments, state["optimizer"]),
        }
        if slot_ME is not None:
            load_ME = state["placement"]["load_ME"]
            load_ME = unless_bad(is_good, load_ME + metrics["expert_load"], load_ME)
            new_state["placement"] = state["placement"] | {"load_ME": load_ME}
        return new_state, metrics | {"bad_step": 1 - is_good.astype(jnp.int32)}

    def step(state: State, token_BN1: jax.Array, most: jax.Array | None = None) -> tuple[State, dict[str, jax.Array]]:
        in_specs = (layout, BATCH_SPEC, REPLICATED)
        return on_mesh(step_here, in_specs=in_specs, out_specs=(layout, REPLICATED))(state, token_BN1, most)

    def evaluate(params: Any, token_BN1: jax.Array, slot_ME: jax.Array | None) -> jax.Array:
        background.new_program()
        if isinstance(plan, pipeline.Plan):
            own = Stage(params, token_BN1, config, how, global_tokens, plan, slot_ME=slot_ME)
            return sum_over_batch(pipelined_loss(own))

        def share(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            number, token_bN1 = part
            when = When(None, number, config.train.grad_accumulation)
            parts = local_objective(params, token_bN1, config.model, how, global_tokens, when, slot_ME)[1]
            return parts.cross_entropy

        parts = in_parts(token_BN1, config)
        return sum_over_batch(jax.lax.map(share, (jnp.arange(len(parts)), parts)).sum())

    return Trainer(
        mesh=mesh,
        plan=plan,
        state_shapes=with_shardings(jax.eval_shape(init), placed),
        param_shapes=with_shardings(shapes, placed["params"]),
        init=jax.jit(init, out_shardings=placed, compiler_options=_INIT_OPTIONS.get(how.platform)),
        begin=jax.jit(begin, out_shardings=placed, donate_argnums=0),
        step=jax.jit(
            step,
            donate_argnums=0,
            compiler_options=compiler_options(how.platform) if plan else None,
        ),
        evaluate=jax.jit(
            lambda params, token_BN1, slot_ME=None: on_mesh(
                evaluate, in_specs=(specs, BATCH_SPEC, REPLICATED), out_specs=REPLICATED
            )(params, token_BN1, slot_ME)
        ),
        has_loss_bound=config.train.skip_spikes,
    )


def in_parts(token_BN1: jax.Array, config: Config) -> jax.Array:
    """This device's sequences as `train.grad_accumulation` parts [A, b, N1]."""
    return token_BN1.reshape(config.train.grad_accumulation, -1, token_BN1.shape[-1])


def plan_of(config: Config, mesh: Mesh) -> Plan | pipeline.Plan | None:
    """In which order a step's tasks run; None: autodiff's and the compiler's. Raises ScheduleError or ConfigError."""
    if config.is_pipelined:
        return pipeline.make_plan(config, mesh)
    return None if config.is_plain else make_plan(config, mesh)


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
    grads, parts = scheduled(part_AbN1[-1], plan=plan, earlier=earlier, when=When(step, count - 1, count))
    return grads, _added(parts_before, parts)


def _total(of_part: Callable[[jax.Array, jax.Array | int], Any], part_AbN1: jax.Array) -> Any:
    """Of all parts, one after another."""
    zeros = optax.tree_utils.tree_zeros_like(jax.eval_shape(of_part, part_AbN1[0], 0))

    def add(total: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return _added(total, of_part(*part)), None

    return jax.lax.scan(add, zeros, (part_AbN1, jnp.arange(len(part_AbN1))))[0]


def _added(some: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, some, others)


def _metrics(total: Parts, norm: jax.Array, rate: jax.Array, config: Config) -> dict[str, jax.Array]:
    """Global numbers of the step, from the parts of all devices."""
    metrics = {
        "cross_entropy": total.cross_entropy,
        "grad_norm": norm,
        "learning_rate": rate,
    }
    if not total.count_ME.size:
        return metrics | {"loss": total.cross_entropy}
    moe = config.model.moe
    auxiliary = moe.load_balance_weight * total.load_balance_loss + moe.router_z_weight * total.router_z_loss
    pairs_M1 = total.count_ME.sum(axis=-1, keepdims=True)
    pairs_M = pairs_M1[:, 0].astype(jnp.float32)  # those of all blocks are more than 32 bits count
    return metrics | {
        "loss": total.cross_entropy + auxiliary,
        "load_balance_loss": total.load_balance_loss,
        "router_z_loss": total.router_z_loss,
        "dropped_fraction": total.num_dropped_M.sum() / pairs_M.sum(),
        "block_dropped_fraction": total.num_dropped_M / pairs_M,
        "expert_load": total.count_ME / pairs_M1,
        "load_max_over_mean": jnp.max(total.count_ME / pairs_M1) * moe.num_experts,
    }
