"""One optimiser step as one jitted `shard_map` program over the whole mesh.

B sequences of this device, N tokens of each and N1 = N + 1; M blocks with experts, E experts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.registry import EXCHANGE_FACTS
from moe_jax.models.gates.seen import When
from moe_jax.models.parameters import init_params, param_dims
from moe_jax.models.placement import by_slot, first_experts
from moe_jax.models.stages import stored, stored_shapes
from moe_jax.models.transformer import Computation
from moe_jax.parallel import background, zero
from moe_jax.parallel.grad_sync import global_norm, sum_over_batch
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.ordering import after
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED, drawn_in_parts, partitions, shardings
from moe_jax.schedule import schedule
from moe_jax.schedule.pipelines.table import Table
from moe_jax.schedule.xla_flags import Value, compiler_options
from moe_jax.step import fault_injection as faults
from moe_jax.step.expert_placement import experts_here, first_placement, slots_of, with_copies_summed
from moe_jax.step.gradients import gradients_of, in_parts, plan_of
from moe_jax.step.losses import Parts, local_objective
from moe_jax.step.optimizer import (
    clip_factor,
    learning_rate,
    make_optimizer,
    state_cuts,
    state_partitions,
    unless_bad,
    updates_done,
    with_counts_unless_bad,
)
from moe_jax.step.pipelined import build as pipeline
from moe_jax.step.pipelined.executor import Stage
from moe_jax.step.pipelined.gradients import pipelined_loss
from moe_jax.step.router_bias import with_moved_biases
from moe_jax.step.scheduled.build import Plan

# Random numbers run once, and LLVM takes seconds to optimise them; the values are the same with its first level.
INIT_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1}}

Metrics = dict[str, jax.Array]
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
    options: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # that the compiler gets with the step

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
    own = _DeviceStep.of(config, mesh)
    how, stages = own.how, own.stages
    moments = state_partitions(own.optimizer, stored_shapes(stages), own.own_specs)
    layout = {"step": REPLICATED, "params": own.specs, "optimizer": moments}
    ranks = config.mesh.expert_ranks(mesh.shape)
    placement = functools.partial(first_placement, config.model, ranks, config.replicas)
    if config.migration.enabled:
        layout["placement"] = dict.fromkeys(jax.eval_shape(placement), REPLICATED)
    placed = shardings(mesh, layout)

    def begin(params: Any) -> State:
        where = {"placement": placement()} if config.migration.enabled else {}
        if config.replicas:
            params = by_slot(params, first_experts(config.model.moe.num_experts, ranks, config.replicas))
        return {"step": jnp.int32(0), "params": params, "optimizer": own.optimizer.init(params), **where}

    def init() -> State:
        params = stored(init_params(config.model, config.train.seed), stages)
        if how.platform == "cpu" and jax.process_count() == 1:
            params = drawn_in_parts(params, placed["params"])
        return begin(params)

    def with_shardings(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree, shardings)

    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    if EXCHANGE_FACTS.of(how.exchange).in_background or config.exchange.in_background:
        background.connect(mesh)

    options = compiler_options(how.platform) if own.plan else {}

    def step(state: State, token_BN1: jax.Array, most: jax.Array | None = None) -> tuple[State, Metrics]:
        in_specs = (layout, BATCH_SPEC, REPLICATED)
        return on_mesh(own.step, in_specs=in_specs, out_specs=(layout, REPLICATED))(state, token_BN1, most)

    def evaluate(params: Any, token_BN1: jax.Array, slot_ME: jax.Array | None = None) -> jax.Array:
        in_specs = (own.specs, BATCH_SPEC, REPLICATED)
        return on_mesh(own.loss, in_specs=in_specs, out_specs=REPLICATED)(params, token_BN1, slot_ME)

    return Trainer(
        mesh=mesh,
        plan=own.plan,
        state_shapes=with_shardings(jax.eval_shape(init), placed),
        param_shapes=with_shardings(stored_shapes(stages), placed["params"]),
        init=jax.jit(init, out_shardings=placed, compiler_options=INIT_OPTIONS.get(how.platform)),
        begin=jax.jit(begin, out_shardings=placed, donate_argnums=0),
        step=jax.jit(step, donate_argnums=0, compiler_options=options),
        evaluate=jax.jit(evaluate),
        has_loss_bound=config.train.skip_spikes,
        options=options,
    )


@dataclasses.dataclass(frozen=True)
class _DeviceStep:
    """What each device runs, inside `shard_map`."""

    config: Config
    how: Computation
    stages: Stages
    dims: Any  # of the parameters
    specs: Any
    cuts: Any  # of parameters and moments between ranks that would have the same
    own_specs: Any  # with the cuts
    plan: Plan | pipeline.Plan | None
    optimizer: optax.GradientTransformationExtraArgs

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> "_DeviceStep":
        dims, cuts = param_dims(config.model), state_cuts(config, mesh)
        specs = partitions(dims, expert_axis(config.mesh))
        return cls(
            config=config,
            how=Computation.of(config, mesh),
            stages=Stages.of(config),
            dims=dims,
            specs=specs,
            cuts=cuts,
            own_specs=zero.part_specs(cuts, specs),
            plan=plan_of(config, mesh),
            optimizer=make_optimizer(config, dims),
        )

    def step(self, state: State, token_BN1: jax.Array, most: jax.Array | None) -> tuple[State, Metrics]:
        """The state behind the step, and its metrics."""
        background.new_program()
        config, platform, slot_ME = self.config, self.how.platform, slots_of(state)
        grads, total, norm = self._gradients(state, token_BN1, slot_ME)
        rate = learning_rate(config)(updates_done(state["optimizer"]))
        metrics = _metrics(total, norm, rate, config)
        is_good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        if most is not None:
            is_good &= metrics["loss"] <= most
        with jax.named_scope("optimizer"):
            factor = clip_factor(norm, config.optimizer.clip_norm)
            params = zero.own_parts(self.cuts, state["params"])
            scaled = jax.tree.map(lambda g: g * factor, grads)
            updates, moments = self.optimizer.update(scaled, state["optimizer"], params, is_good=is_good)
            learned = optax.apply_updates(params, updates)
            learned = with_moved_biases(learned, total.count_ME, self.stages, config.model.moe.bias_update_rate)
            learned = unless_bad(is_good, learned, params)
        new_state = {
            "step": state["step"] + 1,
            "params": zero.gathered(self.cuts, learned, platform),
            "optimizer": with_counts_unless_bad(is_good, moments, state["optimizer"]),
        }
        if slot_ME is not None:
            load_ME = state["placement"]["load_ME"]
            load_ME = unless_bad(is_good, load_ME + metrics["expert_load"], load_ME)
            new_state["placement"] = state["placement"] | {"load_ME": load_ME}
        return new_state, metrics | {"bad_step": 1 - is_good.astype(jnp.int32)}

    def loss(self, params: Any, token_BN1: jax.Array, slot_ME: jax.Array | None) -> jax.Array:
        """Mean nats per token of a batch that nothing is learned from."""
        background.new_program()
        if isinstance(self.plan, pipeline.Plan):
            own = Stage(params, token_BN1, self.config, self.how, self._tokens, self.plan, slot_ME=slot_ME)
            return sum_over_batch(pipelined_loss(own))

        def share(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            number, token_bN1 = part
            when = When(None, number, self.config.train.grad_accumulation)
            found = local_objective(params, token_bN1, self.config.model, self.how, self._tokens, when, slot_ME)[1]
            return found.cross_entropy

        parts = in_parts(token_BN1, self.config)
        return sum_over_batch(jax.lax.map(share, (jnp.arange(len(parts)), parts)).sum())

    def _gradients(self, state: State, token_BN1: jax.Array, slot_ME: jax.Array | None) -> tuple[Any, Parts, jax.Array]:
        """Of this device's cut, with what all devices have counted, and the norm of the whole."""
        config, how, stages = self.config, self.how, self.stages
        seen = faults.struck(state["params"], state["step"])
        grads, parts = gradients_of(
            seen, token_BN1, config, how, self._tokens, self.specs, self.cuts, self.plan, state["step"], slot_ME
        )
        if config.replicas and slot_ME is not None:
            grads = with_copies_summed(grads, slot_ME, stages, how.expert_axis, how.platform)
        here = experts_here(self.dims, slot_ME, stages, how.expert_axis)
        norm = global_norm(grads, self.own_specs, how.platform, here)
        if how.platform == "cpu":  # where a sum keeps the thread that computes, until all devices have come
            parts = jax.tree.map(lambda part: after(part, norm, how.platform) if part.size else part, parts)
        return grads, sum_over_batch(parts), norm

    @property
    def _tokens(self) -> int:
        """Of the global batch."""
        return self.config.train.batch_size * self.config.data.seq_len


def _metrics(total: Parts, norm: jax.Array, rate: jax.Array, config: Config) -> Metrics:
    """Global numbers of the step, from the parts of all devices."""
    metrics = {
        "cross_entropy": total.cross_entropy,
        "grad_norm": norm,
        "learning_rate": rate,
    }
    if not total.count_ME.size:
        return metrics | {"loss": total.cross_entropy}
    moe = config.model.moe
    auxiliary = moe.aux_loss_coeff * total.load_balance_loss + moe.z_loss_coeff * total.router_z_loss
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
