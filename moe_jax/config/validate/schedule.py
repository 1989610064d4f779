"""Rules for schedules and exchanges, and for what they split."""

from moe_jax.config.layer_layout import MIN_ITERATIONS, segments
from moe_jax.config.sections import MeshConfig, Sections
from moe_jax.config.validate.mesh import expert_ranks_text
from moe_jax.errors import ConfigError, divisors_text

_MOST_TASKS = 2**14  # 128 layers with 128 microbatches


def check_schedule(config: Sections) -> None:
    """Raise ConfigError for microbatches or chunks that the policy does not make, or that the gate rules out."""
    settings = config.schedule
    parts, backward = settings.microbatches, settings.backward_microbatches
    if settings.policy_facts.cuts is None and (parts, backward or 1) != (1, 1):
        name = "microbatches" if parts > 1 else "backward_microbatches"
        raise ConfigError(
            f"schedule.{name}={parts if parts > 1 else backward} needs a policy that pipelines: "
            "use schedule.policy=unified or expert_pipeline "
            f"({settings.policy} runs one microbatch; train.grad_accumulation cuts the batch in time)"
        )
    if settings.cuts_batch and backward is not None and parts % backward:
        raise ConfigError(
            f"schedule.backward_microbatches={backward} cannot be made of schedule.microbatches={parts}: "
            f"use {divisors_text(parts)}"
        )
    if not settings.cuts_batch and settings.expert_chunks > 1:
        cure = ", or schedule.microbatches, which cuts slots here" if settings.policy_facts.cuts == "capacity" else ""
        raise ConfigError(
            f"schedule.expert_chunks={settings.expert_chunks} cuts microbatches, which schedule.policy="
            f"{settings.policy} does not have: use schedule.policy=unified{cure}"
        )
    if settings.bucket_cap_mb is not None and settings.grad_reduce != "bucketed":
        raise ConfigError(
            f"schedule.bucket_cap_mb={settings.bucket_cap_mb} cuts nothing with schedule.grad_reduce="
            f"{settings.grad_reduce}: set schedule.grad_reduce=bucketed, or schedule.bucket_cap_mb=null"
        )
    if settings.param_gather != "prefetch" and config.optimizer.zero != 3:
        raise ConfigError(
            f"schedule.param_gather={settings.param_gather} gathers nothing with optimizer.zero="
            f"{config.optimizer.zero}: set optimizer.zero=3, or schedule.param_gather=prefetch"
        )
    if settings.param_gather != "prefetch" and config.step_facts.has_ticks:
        raise ConfigError(
            f"schedule.param_gather={settings.param_gather} gathers blocks one by one, and a step with pipeline passes "
            "gathers all of a stage at its start: use schedule.param_gather=prefetch"
        )
    _check_offload(config)
    _check_tasks(config)
    _check_whole_batch(config)


def _check_offload(config: Sections) -> None:
    """Raise ConfigError if activations should be in host memory, and no loop of a scheduled step saves any."""
    settings, facts = config.schedule, config.step_facts
    if not settings.offload_activations:
        return
    setting, off = "schedule.offload_activations=true", "schedule.offload_activations=false"
    if facts.has_ticks or not facts.orders_tasks:
        raise ConfigError(
            f"{setting} moves what the loop over blocks of a scheduled step saves, and this step "
            f"{'runs pipeline passes' if facts.has_ticks else 'is plain'}: use schedule.policy=unified without "
            f"pipeline stages, or {off}"
        )
    longest = max(segment.repeats for segment in segments(config.model))
    if longest // settings.unroll < MIN_ITERATIONS:
        raise ConfigError(
            f"{setting} needs a loop of at least {MIN_ITERATIONS} iterations, and the longest run of equal periods of "
            f"blocks has {longest}, with schedule.unroll={settings.unroll}: use more layers, a smaller unroll, or {off}"
        )


def _check_tasks(config: Sections) -> None:
    """Raise ConfigError for too many tasks: each one is an object that is ordered, timed and built separately."""
    layers, settings = config.model.num_layers, config.schedule
    tasks = layers * settings.microbatches * settings.expert_chunks
    if tasks > layers and tasks > _MOST_TASKS:
        raise ConfigError(
            f"schedule.microbatches={settings.microbatches} × schedule.expert_chunks={settings.expert_chunks} × "
            f"model.num_layers={layers} are {tasks} tasks of one kind, more than {_MOST_TASKS}: use "
            f"schedule.microbatches={max(_MOST_TASKS // layers // settings.expert_chunks, 1)}, or fewer chunks"
        )


def _check_whole_batch(config: Sections) -> None:
    """Raise ConfigError if microbatches split the batch before a gate that compares all of its tokens.

    Capacity is passed from one microbatch to the next, so each is routed without the tokens of later ones.
    """
    moe, settings = config.model.moe, config.schedule
    if moe.gate_facts.splits or not settings.cuts_batch or settings.microbatches == 1:
        return
    raise ConfigError(
        f"model.moe.gate={moe.gate} compares all tokens of a batch, and schedule.microbatches={settings.microbatches} "
        "cuts the batch before: use schedule.policy=expert_pipeline, which cuts after the gate, or another gate"
    )


def check_node_split(ranks_per_node: int, mesh: MeshConfig) -> None:
    """Raise ConfigError unless the ranks that shard experts divide into nodes."""
    ranks = mesh.expert_ranks(mesh.sizes)
    if ranks % ranks_per_node:
        raise ConfigError(
            f"exchange.ranks_per_node={ranks_per_node} does not divide {expert_ranks_text(mesh)}: "
            f"use {divisors_text(ranks)}"
        )


def check_exchange(config: Sections) -> None:
    """Raise ConfigError for an exchange that does not support the schedule, the gate or the hooks."""
    mesh, per_node = config.mesh, config.exchange.ranks_per_node
    if per_node is not None and min(mesh.sizes[axis] for axis in mesh.expert_axes) > 0:
        check_node_split(per_node, mesh)
    if not config.exchange.facts.ragged:
        return
    ragged = f"exchange.algorithm={config.exchange.algorithm}"
    if not config.schedule.policy_facts.sends_ragged:
        raise ConfigError(
            f"{ragged} sends microbatches, which schedule.policy={config.schedule.policy} does not "
            "have: use schedule.policy=unified, or exchange.algorithm=auto"
        )
    if config.schedule.expert_chunks > 1:
        raise ConfigError(
            f"{ragged} sends whole microbatches, and schedule.expert_chunks="
            f"{config.schedule.expert_chunks} cuts their slots: use 1, or exchange.algorithm=auto"
        )
    if config.model.moe.gate_facts.fills_slots:
        raise ConfigError(
            f"{ragged} leaves out empty slots, and model.moe.gate={config.model.moe.gate} fills all: "
            "use exchange.algorithm=flat"
        )
    if not config.model.moe.sends_capacity_rows:
        raise ConfigError(
            f"{ragged} needs model.moe.capacity_factor and model.moe.dispatcher=sort: "
            "set them, or exchange.algorithm=auto"
        )
    if config.model.moe.has_hooks:
        raise ConfigError(
            f"{ragged} does not call model.moe.hooks={config.model.moe.hooks}: "
            "use exchange.algorithm=flat, or model.moe.hooks=none"
        )
