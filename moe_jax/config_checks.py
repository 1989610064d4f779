"""Which values the settings of a config may have, alone and together.

Each refusal gives the setting, its value and the cure.
"""

import difflib
import math
import re
from typing import TYPE_CHECKING

from moe_jax.errors import ConfigError

if TYPE_CHECKING:  # a Config checks itself with what stands here
    from moe_jax.config import Config, Model, Schedule

# Smallest allowed value of each number; everything not listed is checked below or free.
_AT_LEAST: dict[str, float] = {
    "model.vocab_size": 2,
    "model.d_model": 2,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 2,
    "model.hidden_dim": 1,
    "model.rope_theta": 1,
    "model.moe.num_experts": 0,
    "model.moe.top_k": 1,
    "model.moe.hidden_dim": 1,
    "model.moe.num_shared_experts": 0,
    "model.moe.first_dense_blocks": 0,
    "model.moe.every": 1,
    "model.moe.load_balance_weight": 0,
    "model.moe.router_z_weight": 0,
    "mesh.cpu_devices": 1,
    "exchange.ranks_per_node": 1,
    "exchange.tensor_chunks": 1,
    "schedule.microbatches": 1,
    "schedule.backward_microbatches": 1,
    "schedule.unroll": 1,
    "exchange.buffer_factor": 1,  # with less even a balanced router's rows would be dropped
    "data.seq_len": 2,
    "data.prefetch": 0,
    "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "train.steps": 1,
    "train.seed": 0,
    "train.batch_size": 1,
    "train.grad_accumulation": 1,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "log.every": 1,
    "log.trace_step": 2,  # the first step includes the process's start-up
    "log.sample_tokens": 0,
}
_AT_MOST = 2**31 - 1  # of whole numbers: jax counts steps and takes seeds in 32 bits
# Numbers that must lie above 0.
_POSITIVE = (
    "model.norm_eps",
    "model.moe.capacity_factor",
    "model.moe.routed_scale",
    "optimizer.eps",
    "optimizer.clip_norm",
    "schedule.chunk_mb",
    "schedule.device_tflops",
    "schedule.link_gb_per_s",
    "schedule.network_gb_per_s",
)
_MAY_BE_NULL = (
    *("model.moe.capacity_factor", "exchange.buffer_factor", "optimizer.clip_norm", "log.trace_step", *_POSITIVE[-4:]),
)
# Parts of the model with a name of their own; others are named package.module:name.
_PARTS = {
    "model.moe.gate": ("softmax", "sigmoid"),
    "model.moe.order": ("sort", "einsum"),
    "model.moe.hooks": ("none", "bf16", "fp8"),
}
_ELSEWHERE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
# Numbers that must lie in [0, 1).
_FRACTIONS = ("optimizer.beta1", "optimizer.beta2")


def check_config(config: "Config") -> None:
    """Raise ConfigError for a value out of range, and for settings that contradict each other."""
    _check_ranges(config)
    _check_parts(config)
    _check_model(config.model)
    _check_mesh(config)
    _check_schedule(config.schedule)
    _check_whole_batch(config)
    _check_exchange(config)
    _check_training(config)


def setting(config: "Config", name: str) -> object:
    """The value behind a dotted name, e.g. `setting(config, "model.moe.top_k")`."""
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _number(config: "Config", name: str) -> float | None:
    value = setting(config, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value} must be a finite number")
    return value  # type: ignore[return-value]


def _check_ranges(config: "Config") -> None:
    for name, least in _AT_LEAST.items():
        value = _number(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} must be at least {least}{_or_null(name)}")
        if isinstance(value, int) and value > _AT_MOST:
            raise ConfigError(f"{name}={value} must be at most {_AT_MOST}")
    for name in _POSITIVE:
        value = _number(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value} must be above 0{_or_null(name)}")
    for name in _FRACTIONS:
        value = _number(config, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{name}={value} must be at least 0 and below 1")


def _or_null(name: str) -> str:
    return " (or null)" if name in _MAY_BE_NULL else ""


def _check_parts(config: "Config") -> None:
    for name, own in _PARTS.items():
        value = str(setting(config, name))
        if value not in own and not _ELSEWHERE.fullmatch(value):
            near = difflib.get_close_matches(value, own, n=1)
            cure = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}={value} must be {' or '.join(own)} or package.module:name{cure}")


def _check_model(model: "Model") -> None:
    if model.head_dim is None and model.d_model % model.num_heads:
        raise ConfigError(
            f"model.d_model={model.d_model} is not divisible by model.num_heads={model.num_heads}: "
            f"use {_divisors_text(model.d_model)} heads, or set model.head_dim"
        )
    if model.head_width % 2:
        raise ConfigError(
            f"a head width of {model.head_width} is odd, and rotary embedding turns pairs: set an even model.head_dim"
        )
    if model.num_heads % model.kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}: "
            f"use {_divisors_text(model.num_heads)}"
        )
    moe = model.moe
    if moe.num_experts == 0:
        return
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"model.moe.top_k={moe.top_k} must be 1..model.moe.num_experts={moe.num_experts}")
    if moe.first_dense_blocks >= model.num_layers:
        raise ConfigError(
            f"model.moe.first_dense_blocks={moe.first_dense_blocks} leaves none of model.num_layers={model.num_layers} "
            f"for experts: use 0..{model.num_layers - 1}, or model.moe.num_experts=0 for a dense model"
        )
    if moe.every > model.num_layers - moe.first_dense_blocks:
        raise ConfigError(
            f"model.moe.every={moe.every} puts experts in none of "
            f"the {model.num_layers - moe.first_dense_blocks} blocks: "
            f"use 1..{model.num_layers - moe.first_dense_blocks}, or model.moe.num_experts=0 for a dense model"
        )


def _check_mesh(config: "Config") -> None:
    sizes = config.mesh.sizes
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ConfigError(f"mesh.{name}={size} must be at least 1, or -1 for all remaining devices")
        if name in ("pipeline", "context") and size != 1:
            raise ConfigError(
                f"mesh.{name}={size} is not supported: only data, expert and tensor may exceed 1, so set mesh.{name}=1"
            )
    if sizes["tensor"] > 1:
        check_tensor_split(config, sizes["tensor"])
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(
            f"mesh.{free[0]} and mesh.{free[1]} are both -1, and only one axis can take the remaining devices: "
            f"set mesh.{free[0]}=1"
        )
    experts, ranks = config.model.moe.num_experts, config.mesh.expert
    if ranks > 1:
        check_expert_split(experts, ranks)


def check_tensor_split(config: "Config", ranks: int) -> None:
    """Raise ConfigError unless `ranks` tensor ranks divide heads, hidden widths and sequences."""
    if ranks == 1:
        return
    model = config.model
    divided = {"model.num_heads": model.num_heads, "data.seq_len": config.data.seq_len}
    if model.num_kv_heads is not None:
        divided["model.num_kv_heads"] = model.num_kv_heads
    if "dense" in model.block_kinds:
        divided["model.hidden_dim"] = model.hidden_dim
    if model.moe.num_experts:
        divided["model.moe.hidden_dim"] = model.moe.hidden_dim
    for name, size in divided.items():
        if size % ranks:
            raise ConfigError(
                f"{name}={size} is not divisible by mesh.tensor={ranks}: use {nearest_multiples(size, ranks)}, "
                f"or mesh.tensor={_divisors_text(math.gcd(*divided.values()))}"
            )
    if config.exchange.algorithm == "ragged":
        raise ConfigError(
            f"exchange.algorithm=ragged knows no tensor ranks, and mesh.tensor={ranks}: use exchange.algorithm=flat, "
            "or mesh.tensor=1"
        )


def check_expert_split(num_experts: int, ranks: int) -> None:
    """Raise ConfigError unless the expert axis divides the experts."""
    if num_experts == 0 and ranks > 1:
        raise ConfigError(f"mesh.expert={ranks} has no experts to hold (model.moe.num_experts=0): set mesh.expert=1")
    if num_experts % ranks:
        counts = nearest_multiples(num_experts, ranks)
        raise ConfigError(
            f"model.moe.num_experts={num_experts} is not divisible by mesh.expert={ranks}: "
            f"use {counts} experts, or mesh.expert={_divisors_text(num_experts)}"
        )


def nearest_multiples(number: int, unit: int) -> str:
    """The positive multiples of `unit` next to a number that is none: "6 or 9" for 8 and 3."""
    lower = number - number % unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def check_batch_split(config: "Config", batch_shards: int) -> None:
    """Raise ConfigError unless `train.batch_size` divides over parts, `batch_shards` devices and microbatches."""
    size, parts = config.train.batch_size, config.train.grad_accumulation
    microbatches = config.schedule.microbatches if config.schedule.policy == "unified" else 1
    unit = parts * batch_shards * microbatches
    if size % unit:
        cut = f" × schedule.microbatches={microbatches}" if microbatches > 1 else ""
        raise ConfigError(
            f"train.batch_size={size} is not divisible by train.grad_accumulation={parts} × {batch_shards} devices "
            f"(data × expert){cut} = {unit}: use {nearest_multiples(size, unit)}"
        )


def _check_schedule(settings: "Schedule") -> None:
    parts, backward = settings.microbatches, settings.backward_microbatches
    if settings.policy == "vanilla" and (parts, backward or 1) != (1, 1):
        name = "microbatches" if parts > 1 else "backward_microbatches"
        raise ConfigError(
            f"schedule.{name}={parts if parts > 1 else backward} needs a policy that pipelines: "
            "use schedule.policy=unified or expert_pipeline "
            "(vanilla runs one microbatch; train.grad_accumulation cuts the batch in time)"
        )
    if settings.policy == "unified" and backward is not None and parts % backward:
        raise ConfigError(
            f"schedule.backward_microbatches={backward} cannot be made of schedule.microbatches={parts}: "
            f"use {_divisors_text(parts)}"
        )
    if settings.chunk_mb is not None and settings.grad_reduce != "chunked":
        raise ConfigError(
            f"schedule.chunk_mb={settings.chunk_mb} cuts nothing with schedule.grad_reduce={settings.grad_reduce}: "
            "set schedule.grad_reduce=chunked, or schedule.chunk_mb=null"
        )


def _check_whole_batch(config: "Config") -> None:
    """Capacity passing serves microbatches one after another: nothing that compares all tokens can be cut before."""
    moe, settings = config.model.moe, config.schedule
    if moe.slot_priority != "score":
        return
    if settings.policy == "unified" and settings.microbatches > 1:
        raise ConfigError(
            f"model.moe.slot_priority=score ranks all tokens of a batch, and schedule.microbatches="
            f"{settings.microbatches} cuts the batch before: use schedule.policy=expert_pipeline, which cuts behind "
            "the gate, or model.moe.slot_priority=position"
        )
    if not moe.sends_capacity_rows:
        raise ConfigError(
            "model.moe.slot_priority=score needs model.moe.capacity_factor and model.moe.order=sort: "
            "set them, or model.moe.slot_priority=position"
        )


def check_node_split(ranks_per_node: int, ranks: int) -> None:
    """Raise ConfigError unless the expert axis divides into nodes."""
    if ranks % ranks_per_node:
        raise ConfigError(
            f"exchange.ranks_per_node={ranks_per_node} does not divide mesh.expert={ranks}: use {_divisors_text(ranks)}"
        )


def _check_exchange(config: "Config") -> None:
    if config.exchange.ranks_per_node is not None and config.mesh.expert > 0:
        check_node_split(config.exchange.ranks_per_node, config.mesh.expert)
    if config.exchange.algorithm != "ragged":
        return
    if config.schedule.policy != "unified":
        raise ConfigError(
            f"exchange.algorithm=ragged sends microbatches, which schedule.policy={config.schedule.policy} does not "
            "have: use schedule.policy=unified, or exchange.algorithm=auto"
        )
    if not config.model.moe.sends_capacity_rows:
        raise ConfigError(
            "exchange.algorithm=ragged needs model.moe.capacity_factor and model.moe.order=sort: "
            "set them, or exchange.algorithm=auto"
        )
    if config.model.moe.hooks != "none":
        raise ConfigError(
            f"exchange.algorithm=ragged does not call model.moe.hooks={config.model.moe.hooks}: "
            "use exchange.algorithm=flat, or model.moe.hooks=none"
        )


def _check_training(config: "Config") -> None:
    fraction = config.data.validation_fraction
    if not 0 < fraction < 1:
        raise ConfigError(f"data.validation_fraction={fraction} must lie between 0 and 1")
    if not 0 <= config.optimizer.final_fraction <= 1:
        raise ConfigError(f"optimizer.final_fraction={config.optimizer.final_fraction} must lie in 0..1")
    if not config.data.path:
        raise ConfigError("data.path is empty: name a .txt file or a prepared folder")
    if not config.log.dir:
        raise ConfigError("log.dir is empty: name the folder that receives the run")
    traced, steps = config.log.trace_step, config.train.steps
    if traced is not None and traced > steps:
        raise ConfigError(
            f"log.trace_step={traced} is never reached with train.steps={steps}: use {traced} steps or more, or null"
        )


def _divisors_text(n: int) -> str:
    divisors = [str(d) for d in range(1, n + 1) if n % d == 0]
    if len(divisors) > 6:
        divisors = [*divisors[:5], divisors[-1]]
        return ", ".join(divisors[:-1]) + f" … or {divisors[-1]}"
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + f" or {divisors[-1]}"
