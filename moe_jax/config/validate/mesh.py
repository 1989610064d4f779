"""Rules for the mesh: sizes must divide evenly over the axes that shard them."""

import math

from moe_jax.config.sections import MeshConfig, ModelConfig, Sections
from moe_jax.errors import ConfigError, divisors_text, nearest_multiples


def check_mesh(config: Sections) -> None:
    """Raise ConfigError for an axis of invalid size, or for sizes that do not divide over the axes."""
    sizes = config.mesh.sizes
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ConfigError(f"mesh.{name}={size} must be at least 1, or -1 for all remaining devices")
    if sizes["tensor"] > 1:
        _check_tensor_split(config, sizes["tensor"])
    if sizes["context"] > 1:
        _check_context_split(config, sizes["context"], max(sizes["tensor"], 1))
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(
            f"mesh.{free[0]} and mesh.{free[1]} are both -1, and only one axis can take the remaining devices: "
            f"set mesh.{free[0]}=1"
        )
    _check_expert_split(config)
    _check_tensor_tasks(config)


def _check_tensor_split(config: Sections, ranks: int) -> None:
    """Raise ConfigError unless heads, hidden widths and sequences divide over `ranks` tensor ranks."""
    divided = widths_over_tensor(config.model, config.mesh) | {"data.seq_len": config.data.seq_len}
    for name, size in divided.items():
        if size % ranks:
            raise ConfigError(
                f"{name}={size} is not divisible by mesh.tensor={ranks}: use {nearest_multiples(size, ranks)}, "
                f"or mesh.tensor={divisors_text(math.gcd(*divided.values()))}"
            )
    if config.exchange.facts.ragged and not config.mesh.experts_over_tensor:
        raise ConfigError(
            f"exchange.algorithm={config.exchange.algorithm} knows no tensor ranks, and mesh.tensor={ranks}: "
            "use exchange.algorithm=flat, mesh.experts_over_tensor=true, or mesh.tensor=1"
        )


def widths_over_tensor(model: ModelConfig, mesh: MeshConfig) -> dict[str, int]:
    """Return the numbers of a model that tensor ranks divide, by the names of their settings."""
    divided = {"model.num_attention_heads": model.num_attention_heads}
    if model.num_key_value_heads is not None:
        divided["model.num_key_value_heads"] = model.num_key_value_heads
    if model.has_delta_nets:
        name = "num_value_heads" if model.delta_net.num_key_heads is None else "num_key_heads"
        divided[f"model.delta_net.{name}"] = model.delta_net.key_heads
    if model.has_mamba:
        divided["model.mamba.num_heads"] = model.mamba.num_heads or 0
        if model.mamba.n_groups > 1:  # the only group is shared
            divided["model.mamba.n_groups"] = model.mamba.n_groups
    if model.num_mlp_blocks or model.moe.dense_residual:
        divided["model.intermediate_size"] = model.intermediate_size
    if model.moe.num_experts and (model.moe.num_shared_experts or not mesh.experts_over_tensor):
        divided["model.moe.intermediate_size"] = model.moe.intermediate_size
    return divided


def _check_context_split(config: Sections, ranks: int, tensor_ranks: int) -> None:
    """Raise ConfigError unless a sequence divides into two pieces for each context rank, and each over tensor ranks."""
    if config.model.has_delta_nets:
        raise ConfigError(
            f"model.delta_net.num_value_heads={config.model.delta_net.num_value_heads} and mesh.context={ranks}: the "
            "states of gated delta nets do not travel between context ranks: use mesh.context=1, or "
            "model.delta_net.num_value_heads=null"
        )
    if config.model.has_mamba:
        raise ConfigError(
            f"model.mamba.num_heads={config.model.mamba.num_heads} and mesh.context={ranks}: the states of Mamba-2 do "
            "not travel between context ranks: use mesh.context=1, or model.mamba.num_heads=null"
        )
    length, unit = config.data.seq_len, ranks * math.lcm(2, tensor_ranks)
    if length % unit:
        tensor = f" × mesh.tensor={tensor_ranks}" if tensor_ranks > 1 else ""
        rest = length // math.lcm(2, tensor_ranks) if length % math.lcm(2, tensor_ranks) == 0 else 1
        raise ConfigError(
            f"data.seq_len={length} is not divisible into two pieces for each of mesh.context={ranks}{tensor}: "
            f"use {nearest_multiples(length, unit)}, or mesh.context={divisors_text(rest)}"
        )


def _check_expert_split(config: Sections) -> None:
    """Raise ConfigError unless experts divide over the ranks that shard them; axes of size -1 are not checked."""
    sizes = config.mesh.sizes
    num_experts, others = config.model.moe.num_experts, [axis for axis in config.mesh.expert_axes if axis != "expert"]
    for axis in others:
        _check_shared(axis, num_experts, sizes[axis])
    if config.mesh.experts_over_tensor and config.exchange.tensor_form != "sharded":
        raise ConfigError(
            f"exchange.tensor_form={config.exchange.tensor_form} is how tensor ranks share each expert, and with "
            "mesh.experts_over_tensor=true they share none: use exchange.tensor_form=sharded"
        )
    if min(sizes[axis] for axis in config.mesh.expert_axes) == -1:
        return
    ranks, text = config.mesh.expert_ranks(sizes), expert_ranks_text(config.mesh)
    if num_experts == 0 and ranks > 1:
        raise ConfigError(f"{text} has no experts to hold (model.moe.num_experts=0): set mesh.expert=1")
    if num_experts % ranks:
        of_expert, rest = divmod(num_experts, math.prod(sizes[axis] for axis in others))
        cure = f"mesh.experts_over_{others[0]}=false" if rest else f"mesh.expert={divisors_text(of_expert)}"
        raise ConfigError(
            f"model.moe.num_experts={num_experts} is not divisible by {text}: "
            f"use {nearest_multiples(num_experts, ranks)} experts, or {cure}"
        )


def _check_tensor_tasks(config: Sections) -> None:
    """Raise ConfigError if gathers over tensor ranks are to be tasks of a schedule that the step does not have."""
    if config.exchange.tensor_form == "sharded_scheduled" and not config.step_facts.orders_tasks:
        raise ConfigError(
            "exchange.tensor_form=sharded_scheduled makes gathers over tensor ranks tasks of a schedule, and this step "
            "has none: use schedule.policy=unified schedule.microbatches=2, or exchange.tensor_form=sharded"
        )


def _check_shared(axis: str, num_experts: int, ranks: int) -> None:
    """Raise ConfigError for experts that are sharded over another axis, too, without experts or without its ranks."""
    name = f"mesh.experts_over_{axis}"
    if num_experts == 0:
        raise ConfigError(f"{name}=true has no experts to cut (model.moe.num_experts=0): set {name}=false")
    if ranks == 1:
        raise ConfigError(
            f"{name}=true cuts experts over {axis} ranks, and mesh.{axis}=1: use mesh.{axis}=2 or more, or {name}=false"
        )


def expert_ranks_text(mesh: MeshConfig) -> str:
    """Return the axes that shard experts, with their sizes, for a message."""
    return " × ".join(f"mesh.{axis}={mesh.sizes[axis]}" for axis in mesh.expert_axes)


def check_batch_split(config: Sections, batch_shards: int) -> None:
    """Raise ConfigError unless the batch divides over accumulation parts, `batch_shards` devices and microbatches."""
    size, parts = config.train.batch_size, config.train.grad_accumulation
    microbatches = config.schedule.microbatches if config.schedule.cuts_batch else 1
    unit = parts * batch_shards * microbatches
    if size % unit:
        cut = f" × schedule.microbatches={microbatches}" if microbatches > 1 else ""
        raise ConfigError(
            f"train.batch_size={size} is not divisible by train.grad_accumulation={parts} × {batch_shards} devices "
            f"(data × expert){cut} = {unit}: use {nearest_multiples(size, unit)}"
        )
