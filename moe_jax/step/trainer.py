"""The jitted programs of a run: the training step and evaluation as `shard_map` programs over the whole mesh.

B sequences of the global batch, N tokens of each and N1 = N + 1; M blocks with experts, E experts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from moe_jax.config import Config
from moe_jax.config.registry import EXCHANGE_FACTS
from moe_jax.models.parameters import init_params, stored, stored_shapes
from moe_jax.models.placement import by_slot, first_experts
from moe_jax.models.precision import exact_products
from moe_jax.parallel import background
from moe_jax.parallel.grad_sync import sum_over_batch
from moe_jax.parallel.host_memory import check_host_memory
from moe_jax.parallel.mesh import with_sizes_of
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED, shard_random_init, shardings
from moe_jax.parallel.trees import Params, Tree
from moe_jax.schedule import schedule
from moe_jax.schedule.pipelines.table import Table
from moe_jax.schedule.xla_flags import Value, compiler_options, memory_option, ragged_options
from moe_jax.step.context import State, StepContext, StepInputs
from moe_jax.step.expert_placement import first_placement
from moe_jax.step.kinds import StepKind, step_kind
from moe_jax.step.losses import Metrics
from moe_jax.step.moving_average import first_average
from moe_jax.step.offload import in_host_memory
from moe_jax.step.optimizer import known_parameters, state_partitions
from moe_jax.step.plain import train_step

# Initialization runs once, but LLVM takes seconds to optimise it; its lowest level gives the same values.
INIT_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1}}


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The programs of a run. All use the same mesh and state layout."""

    mesh: Mesh
    kind: StepKind
    state_shapes: State  # ShapeDtypeStructs that carry shardings
    param_shapes: Params  # parameters without copies of experts, with shardings
    init: Wrapped  # () → State
    begin: Wrapped  # parameters like param_shapes (donated, unless experts have copies) → State
    # State (donated), batch, max_loss (optional: no limit), experts of a record (optional: gates choose) → State,
    # metrics
    step: Wrapped
    # parameters (their average, with optimizer.ema_decay), batch, placement (None: experts in order) → mean nats per
    # token
    evaluate: Wrapped
    has_loss_bound: bool = False  # whether the run passes max_loss to the step
    replayed_shape: tuple[int, ...] | None = None  # of the experts of a record that the run passes to the step
    options: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # compiler options of the step

    def step_shapes(self, batch: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
        """Return the shapes of the step's arguments."""
        everywhere = NamedSharding(self.mesh, REPLICATED)
        bound = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere) if self.has_loss_bound else None
        if self.replayed_shape is not None:
            replayed = jax.ShapeDtypeStruct(self.replayed_shape, jnp.int32, sharding=everywhere)
            return self.state_shapes, batch, bound, replayed
        return (self.state_shapes, batch) if bound is None else (self.state_shapes, batch, bound)

    @property
    def schedule(self) -> schedule.Schedule | None:
        """The task order of a scheduled step; None for other kinds."""
        return self.kind.schedule

    @property
    def table(self) -> Table | None:
        """The tick table of a pipelined step; None for other kinds."""
        return self.kind.pipeline.table if self.kind.pipeline else None


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Build the programs. Nothing is compiled or allocated yet.

    Batches are int32 [train.batch_size, data.seq_len + 1], sharded over the data and expert axes. Raises ConfigError or
    ScheduleError.
    """
    config = with_sizes_of(mesh, config)
    context, kind = StepContext.of(config, mesh), step_kind(config, mesh)
    compute, stages = context.compute, context.stages
    param_shapes = stored_shapes(stages)
    moments = state_partitions(context.optimizer, param_shapes, context.grad_specs)
    layout = {"step": REPLICATED, "params": context.stored_specs, "optimizer": moments}
    ranks = config.mesh.expert_ranks(mesh.shape)
    placement = functools.partial(first_placement, config.model, ranks, config.replicas, config.rank_speeds)
    decay = config.optimizer.ema_decay
    if decay is not None:
        layout |= first_average(context.grad_specs, decay)
    if config.migration.enabled:
        layout["placement"] = dict.fromkeys(jax.eval_shape(placement), REPLICATED)
    placed = shardings(mesh, layout)
    if config.optimizer.offload_moments:
        placed["optimizer"] = in_host_memory(placed["optimizer"], known_parameters(context.dims))

    if config.schedule.offload_activations:
        check_host_memory(mesh.devices.flat[0], "schedule.offload_activations")

    def begin(params: Params) -> State:
        where: State = {"placement": placement()} if config.migration.enabled else {}
        if config.replicas:
            expert_S = first_experts(config.model.moe.num_experts, ranks, config.replicas, config.rank_speeds)
            params = by_slot(params, expert_S)
        where |= first_average(params, decay)
        return {"step": jnp.int32(0), "params": params, "optimizer": context.optimizer.init(params), **where}

    def init() -> State:
        params = stored(init_params(config.model, config.train.seed), stages)
        if compute.platform == "cpu" and jax.process_count() == 1:
            params = shard_random_init(params, placed["params"])
        return begin(params)

    def with_shardings(tree: Tree, shardings: Tree) -> Tree:
        return jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), tree, shardings)

    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    if EXCHANGE_FACTS.of(compute.exchange).in_background or config.exchange.in_background:
        background.connect(mesh)

    options = compiler_options(compute.platform, mesh.devices.flat[0].device_kind) if kind.facts.orders_tasks else {}
    options |= memory_option(config.schedule.memory_percent, compute.platform)
    of_evaluation = ragged_options(compute.platform) if EXCHANGE_FACTS.of(compute.exchange).ragged else {}

    def step(
        state: State,
        token_BN1: jax.Array,
        max_loss: jax.Array | None = None,
        replayed_LGk: jax.Array | None = None,
    ) -> tuple[State, Metrics]:
        own = functools.partial(train_step, context=context, gradients=kind.gradients)
        in_specs = (layout, BATCH_SPEC, REPLICATED, REPLICATED)
        mapped = on_mesh(own, in_specs=in_specs, out_specs=(layout, REPLICATED))
        with exact_products(compute.dtype, compute.platform):
            return mapped(state, token_BN1, max_loss, replayed_LGk)

    def evaluate(params: Params, token_BN1: jax.Array, slot_ME: jax.Array | None = None) -> jax.Array:
        def own(params: Params, token_BN1: jax.Array, slot_ME: jax.Array | None) -> jax.Array:
            background.new_program()
            if decay is not None:
                params = context.as_stored(params)  # whole, from shards of the average
            inputs = StepInputs.of(token_BN1, context, slot_ME=slot_ME)
            return sum_over_batch(kind.evaluate(params, inputs, context.of_evaluation))

        in_specs = (context.stored_specs if decay is None else context.grad_specs, BATCH_SPEC, REPLICATED)
        with exact_products(compute.dtype, compute.platform):
            return on_mesh(own, in_specs=in_specs, out_specs=REPLICATED)(params, token_BN1, slot_ME)

    return Trainer(
        mesh=mesh,
        kind=kind,
        state_shapes=with_shardings(jax.eval_shape(begin, param_shapes), placed),
        param_shapes=with_shardings(param_shapes, placed["params"]),
        init=jax.jit(init, out_shardings=placed, compiler_options=INIT_OPTIONS.get(compute.platform)),
        begin=jax.jit(begin, out_shardings=placed, donate_argnums=() if config.replicas else 0),  # other shapes
        step=jax.jit(step, donate_argnums=0, compiler_options=options),
        evaluate=jax.jit(evaluate, compiler_options=of_evaluation),
        has_loss_bound=config.train.skip_spikes,
        replayed_shape=_replayed_shape(config),
        options=options,
    )


def _replayed_shape(config: Config) -> tuple[int, ...] | None:
    if config.train.replay_routing is None:
        return None
    model, tokens = config.model, config.train.batch_size * config.data.seq_len
    return model.num_layers, tokens, model.moe.top_k
