"""Which values each setting may have by itself."""

import difflib
import math
import operator
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from moe_jax.errors import ConfigError
from moe_jax.gate_table import GATES

if TYPE_CHECKING:
    from moe_jax.config import Sections

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
    "model.rope_scaling.factor": 1,
    "model.rope_scaling.original_length": 1,
    "model.rope_scaling.mscale_all_dim": 0,
    "model.attention.window": 1,
    "model.attention.full_every": 1,
    "model.attention.nope_every": 1,
    "model.latent.kv_lora_rank": 1,
    "model.latent.q_lora_rank": 1,
    "model.latent.qk_nope_head_dim": 1,
    "model.latent.qk_rope_head_dim": 2,
    "model.latent.v_head_dim": 1,
    "model.moe.num_experts": 0,
    "model.moe.top_k": 1,
    "model.moe.hidden_dim": 1,
    "model.moe.num_shared_experts": 0,
    "model.moe.num_groups": 1,
    "model.moe.top_groups": 1,
    "model.moe.router_rank": 1,
    "model.moe.slots_per_expert": 1,
    "model.moe.first_dense_blocks": 0,
    "model.moe.every": 1,
    "model.moe.load_balance_weight": 0,
    "model.moe.router_z_weight": 0,
    "model.moe.bias_update_rate": 0,
    "mesh.cpu_devices": 1,
    "exchange.ranks_per_node": 1,
    "exchange.tensor_chunks": 1,
    "schedule.microbatches": 1,
    "schedule.backward_microbatches": 1,
    "schedule.expert_chunks": 1,
    "schedule.unroll": 1,
    "schedule.virtual_stages": 1,
    "schedule.head_blocks": 0,
    "exchange.buffer_factor": 1,  # with less even a balanced router's rows would be dropped
    "data.seq_len": 2,
    "data.prefetch": 0,
    "data.damaged_chunks": 0,
    "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "train.steps": 1,
    "train.seed": 0,
    "train.batch_size": 1,
    "train.grad_accumulation": 1,
    "train.loss_chunk": 1,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.bad_in_a_row": 1,
    "train.spike_factor": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.safety_copies_every": 0,
    "tune.samples": 2,
    "tune.iterations": 1,
    "tune.patience": 1,
    "migration.every": 1,
    "migration.threshold": 1,
    "migration.patience": 1,
    "migration.payback_steps": 1,
    "migration.replicas": 0,
    "log.every": 1,
    "log.expert_load_every": 1,
    "log.alarm_unused_steps": 1,
    "log.sample_tokens": 0,
}
_AT_MOST = 2**31 - 1  # of whole numbers: jax counts steps and takes seeds in 32 bits
_SIMULATED_AT_MOST = 512  # devices, each with several threads and copies of what is not cut
# Numbers that must lie above 0.
_POSITIVE = (
    "model.norm_eps",
    "model.latent.norm_eps",
    "model.rope_scaling.slow_turns",
    "model.rope_scaling.fast_turns",
    "model.rope_scaling.attention_factor",
    "model.moe.capacity_factor",
    "model.moe.routed_scale",
    "optimizer.eps",
    "optimizer.clip_norm",
    "schedule.chunk_mb",
    "schedule.device_tflops",
    "schedule.link_gb_per_s",
    "schedule.network_gb_per_s",
    "tune.band",
)
# Parts with a name of their own; others are named package.module:name.
OWN_PARTS = {
    "model.moe.gate": tuple(GATES),
    "model.moe.order": ("sort", "einsum"),
    "model.moe.hooks": ("none", "bf16", "fp8"),
    "schedule.policy": ("vanilla", "expert_pipeline", "unified"),
    "exchange.algorithm": ("auto", "flat", "ring", "hier_1d", "hier_2d", "halo", "ragged", "background"),
}
_OPEN = ("schedule.policy",)  # of these, what may say auto until it is planned
_ELSEWHERE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
# Numbers that must lie in [0, 1).
_FRACTIONS = ("optimizer.beta1", "optimizer.beta2", "log.alarm_entropy")


def setting(config: "Sections", name: str) -> object:
    """The value behind a dotted name, e.g. `setting(config, "model.moe.top_k")`."""
    value: object = operator.attrgetter(name)(config)
    return value


def check_ranges(config: "Sections") -> None:
    """Raise ConfigError for a number out of its range."""
    for name, value in _numbers(config, _AT_LEAST):
        if value < _AT_LEAST[name]:
            raise ConfigError(f"{name}={value} must be at least {_AT_LEAST[name]}{_or_null(config, name)}")
        if isinstance(value, int) and value > _AT_MOST:
            raise ConfigError(f"{name}={value} must be at most {_AT_MOST}")
    if (devices := config.mesh.cpu_devices) is not None and devices > _SIMULATED_AT_MOST:
        raise ConfigError(
            f"mesh.cpu_devices={devices} simulated devices are more than one machine can run: use "
            f"{_SIMULATED_AT_MOST} or fewer, or python -m moe_jax.plan, which plans for clusters that need not be there"
        )
    for name, value in _numbers(config, _POSITIVE):
        if value <= 0:
            raise ConfigError(f"{name}={value} must be above 0{_or_null(config, name)}")
    for name, value in _numbers(config, _FRACTIONS):
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value} must be at least 0 and below 1")


def _numbers(config: "Sections", names: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Those that are given."""
    for name, value in zip(names, operator.attrgetter(*names)(config), strict=True):
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value} must be a finite number")
        yield name, value


def _or_null(config: "Sections", name: str) -> str:
    section, _, own = name.rpartition(".")
    kind = type(setting(config, section)).__annotations__[own]
    return " (or null)" if isinstance(None, kind) else ""


def check_parts(config: "Sections") -> None:
    """Raise ConfigError for a part that is neither the project's own nor elsewhere."""
    for name, own in OWN_PARTS.items():
        value = str(setting(config, name))
        if value not in own and not _ELSEWHERE.fullmatch(value):
            near = difflib.get_close_matches(value, [*own, "auto"] if name in _OPEN else own, n=1)
            cure = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}={value} must be {_either(own)} or package.module:name{cure}")


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(names) if len(names) <= 3 else f"{', '.join(names[:-1])} or {names[-1]},"
