"""Which values each setting may have by itself."""

import math
import operator
from typing import NamedTuple

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError

_ANY = 2**31 - 1  # jax counts steps and takes seeds in 32 bits; such a number costs nothing by itself
_BLOCKS = 4096  # each of which is looked at, as is each part of a step
_PARTS = 1024
_WIDTH = 2**20  # of a hidden layer
_EXPERTS = 2**16
_SEQUENCE = 2**24
_LARGE = 1e6  # of factors
_FINITE = 1e30  # of what float32 holds


class Range(NamedTuple):
    """The smallest and the largest value that a setting may have; `above`, `below`: without this value itself."""

    least: float
    most: float
    above: bool = False
    below: bool = False


SEEDS = Range(0, _ANY)
SAMPLED = Range(0, 2**16)  # tokens
SIMULATED = Range(1, 512)  # devices, each with several threads and copies of what is not cut
CLUSTER = Range(1, 2**20)  # devices, or processes

# Of every number of a config. The largest ones are far above published models and clusters, and small enough that
# what depends on one of them alone neither takes minutes nor fills the memory before the run is refused for its size.
RANGES: dict[str, Range] = {
    "model.vocab_size": Range(2, 2**24),
    "model.hidden_size": Range(2, 2**17),
    "model.num_layers": Range(1, _BLOCKS),
    "model.num_attention_heads": Range(1, 2**14),
    "model.num_key_value_heads": Range(1, 2**14),
    "model.head_dim": Range(2, 2**16),
    "model.intermediate_size": Range(1, _WIDTH),
    "model.rope_theta": Range(1, 1e15),
    "model.rms_norm_eps": Range(0, 1, above=True),
    "model.rope_scaling.factor": Range(1, _LARGE),
    "model.rope_scaling.original_max_position_embeddings": Range(1, _ANY),
    "model.rope_scaling.slow_turns": Range(0, _LARGE, above=True),
    "model.rope_scaling.fast_turns": Range(0, _LARGE, above=True),
    "model.rope_scaling.attention_factor": Range(0, _LARGE, above=True),
    "model.rope_scaling.mscale_all_dim": Range(0, _LARGE),
    "model.attention.sliding_window": Range(1, _ANY),
    "model.attention.full_every": Range(1, _ANY),
    "model.attention.nope_every": Range(1, _ANY),
    "model.latent.kv_lora_rank": Range(1, 2**17),
    "model.latent.q_lora_rank": Range(1, 2**17),
    "model.latent.qk_nope_head_dim": Range(1, 2**16),
    "model.latent.qk_rope_head_dim": Range(2, 2**16),
    "model.latent.v_head_dim": Range(1, 2**16),
    "model.latent.rms_norm_eps": Range(0, 1, above=True),
    "model.moe.num_experts": Range(0, _EXPERTS),
    "model.moe.top_k": Range(1, _EXPERTS),
    "model.moe.intermediate_size": Range(1, _WIDTH),
    "model.moe.num_shared_experts": Range(0, _PARTS),
    "model.moe.capacity_factor": Range(0, _EXPERTS, above=True),
    "model.moe.capacity_schedule": Range(0, _ANY, above=True),  # of its numbers; check_gate bounds each
    "model.moe.routed_scaling_factor": Range(0, _LARGE, above=True),
    "model.moe.n_group": Range(1, _EXPERTS),
    "model.moe.topk_group": Range(1, _EXPERTS),
    "model.moe.router_rank": Range(1, 2**17),
    "model.moe.slots_per_expert": Range(1, 2**20),
    "model.moe.first_k_dense_replace": Range(0, _BLOCKS),
    "model.moe.moe_layer_freq": Range(1, _BLOCKS),
    "model.moe.aux_loss_coeff": Range(0, _LARGE),
    "model.moe.z_loss_coeff": Range(0, _LARGE),
    "model.moe.bias_update_rate": Range(0, _LARGE),
    "mesh.data": Range(-_ANY, CLUSTER.most),  # check_mesh: at least 1, or -1
    "mesh.expert": Range(-_ANY, CLUSTER.most),
    "mesh.pipeline": Range(-_ANY, CLUSTER.most),
    "mesh.tensor": Range(-_ANY, CLUSTER.most),
    "mesh.context": Range(-_ANY, CLUSTER.most),
    "mesh.cpu_devices": SIMULATED,
    "schedule.microbatches": Range(1, _PARTS),
    "schedule.backward_microbatches": Range(1, _PARTS),
    "schedule.expert_chunks": Range(1, _PARTS),
    "schedule.bucket_cap_mb": Range(0, _LARGE, above=True),
    "schedule.device_tflops": Range(0, _FINITE, above=True),
    "schedule.link_gb_per_s": Range(0, _FINITE, above=True),
    "schedule.network_gb_per_s": Range(0, _FINITE, above=True),
    "schedule.unroll": Range(1, _BLOCKS),
    "schedule.virtual_stages": Range(1, _PARTS),
    "schedule.head_blocks": Range(0, _BLOCKS),
    "exchange.ranks_per_node": CLUSTER,
    "exchange.tensor_chunks": Range(1, _PARTS),
    "exchange.rank_capacity_factor": Range(1, _EXPERTS),  # with less even a balanced router's rows would be dropped
    "data.seq_len": Range(2, _SEQUENCE),
    "data.validation_fraction": Range(0, 1, above=True, below=True),
    "data.prefetch": Range(0, _PARTS),
    "data.damaged_chunks": Range(0, _ANY),
    "optimizer.learning_rate": Range(0, _LARGE),
    "optimizer.warmup_steps": Range(0, _ANY),
    "optimizer.final_fraction": Range(0, 1),
    "optimizer.beta1": Range(0, 1, below=True),
    "optimizer.beta2": Range(0, 1, below=True),
    "optimizer.eps": Range(0, _LARGE, above=True),
    "optimizer.weight_decay": Range(0, _LARGE),
    "optimizer.clip_norm": Range(0, _FINITE, above=True),
    "train.steps": Range(1, _ANY),
    "train.seed": SEEDS,
    "train.batch_size": Range(1, 2**20),
    "train.grad_accumulation": Range(1, 2**16),
    "train.loss_chunk": Range(1, _ANY),
    "train.eval_every": Range(0, _ANY),
    "train.eval_batches": Range(1, _ANY),  # no more than the text has
    "train.bad_in_a_row": Range(1, _ANY),
    "train.spike_factor": Range(1, _FINITE),
    "checkpoint.every": Range(0, _ANY),
    "checkpoint.keep": Range(1, _ANY),
    "checkpoint.safety_copies_every": Range(0, _ANY),
    "tune.samples": Range(2, _PARTS),
    "tune.iterations": Range(1, _ANY),
    "tune.band": Range(0, 1e12, above=True),
    "tune.patience": Range(1, _ANY),
    "migration.every": Range(1, _ANY),
    "migration.threshold": Range(1, _LARGE),
    "migration.patience": Range(1, _ANY),
    "migration.payback_steps": Range(1, _ANY),
    "migration.replicas": Range(0, _PARTS),
    "log.every": Range(1, _ANY),
    "log.expert_load_every": Range(1, _ANY),
    "log.alarm_unused_steps": Range(1, _ANY),
    "log.alarm_entropy": Range(0, 1, below=True),
    "log.trace_step": Range(2, _ANY),  # of each of its numbers; check_training holds them against the run's steps
    "log.sample_tokens": SAMPLED,
}


def setting(config: Sections, name: str) -> object:
    """The value behind a dotted name, e.g. `setting(config, "model.moe.top_k")`."""
    value: object = operator.attrgetter(name)(config)
    return value


def check_ranges(config: Sections) -> None:
    """Raise ConfigError for a number out of its range."""
    for name, value in zip(RANGES, operator.attrgetter(*RANGES)(config), strict=True):
        if value is None or isinstance(value, tuple):
            continue
        most = RANGES["mesh.cpu_devices"].most
        if name == "mesh.cpu_devices" and value > most:
            raise ConfigError(
                f"mesh.cpu_devices={value} must be at most {most}, which one machine can simulate: use fewer, or "
                "python -m moe_jax.plan, which plans for clusters that need not be there"
            )
        check_number(name, value, RANGES[name], _or_null(config, name))


def check_number(name: str, value: float | None, allowed: Range, or_null: str = "") -> None:
    """Raise ConfigError for a number that is given, of a config or a command line, and out of its range."""
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value} must be a finite number")
    least, most, above, below = allowed
    too_small = value <= least if above else value < least
    too_large = value >= most if below else value > most
    if not too_small and not too_large:
        return
    if below:
        words = f"lie between {least} and {most}" if above else f"be at least {least} and below {most}"
    else:
        words = f"be at most {most:.15g}" if too_large else f"be {'above' if above else 'at least'} {least}{or_null}"
    raise ConfigError(f"{name}={value} must {words}")


def _or_null(config: Sections, name: str) -> str:
    section, _, own = name.rpartition(".")
    kind = type(setting(config, section)).__annotations__[own]
    return " (or null)" if isinstance(None, kind) else ""
