"""Rules for the model: attention heads, rotary embedding, experts and their blocks, multi-token prediction."""

import functools

from moe_jax.config.sections import ModelConfig, Sections, TrainConfig
from moe_jax.config.validate.gate import check_gate
from moe_jax.config.validate.ranges import RANGES, check_changes
from moe_jax.errors import ConfigError, divisors_text


@functools.lru_cache(maxsize=64)
def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for invalid heads, latents, windows, rotary scaling or experts."""
    if model.has_latents:
        _check_latents(model)
    else:
        _check_heads(model)
    _check_views(model)
    _check_rope(model)
    _check_experts(model)


def _check_heads(model: ModelConfig) -> None:
    if model.latent.q_lora_rank is not None:
        raise ConfigError(
            f"model.latent.q_lora_rank={model.latent.q_lora_rank} without model.latent.kv_lora_rank: "
            "set both, or model.latent.q_lora_rank=null"
        )
    if model.head_dim is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}: "
            f"use {divisors_text(model.hidden_size)} heads, or set model.head_dim"
        )
    if model.head_width % 2:
        raise ConfigError(
            f"a head width of {model.head_width} is odd, and rotary embedding turns pairs: set an even model.head_dim"
        )
    if model.rotary_width % 2 or model.rotary_width == 0:
        raise ConfigError(
            f"model.partial_rotary_factor={model.partial_rotary_factor} rotates {model.rotary_width} of a head's "
            f"{model.head_width} features, and rotary embedding turns pairs: use a factor that rotates an even "
            "number, 2 or more"
        )
    if model.num_attention_heads % model.kv_heads:
        raise ConfigError(
            f"model.num_key_value_heads={model.num_key_value_heads} does not divide "
            f"model.num_attention_heads={model.num_attention_heads}: "
            f"use {divisors_text(model.num_attention_heads)}"
        )
    if model.qk_norm_after_rope and not model.qk_norm:
        raise ConfigError(
            "model.qk_norm_after_rope=true without norms: set model.qk_norm=true, or model.qk_norm_after_rope=false"
        )


def _check_latents(model: ModelConfig) -> None:
    rank = f"model.latent.kv_lora_rank={model.latent.kv_lora_rank}"
    if model.latent.qk_rope_head_dim % 2:
        raise ConfigError(
            f"model.latent.qk_rope_head_dim={model.latent.qk_rope_head_dim} is odd, and rotary embedding turns pairs: "
            "use an even number"
        )
    for name, value, unset in (
        ("num_key_value_heads", model.num_key_value_heads, None),
        ("head_dim", model.head_dim, None),
        ("partial_rotary_factor", model.partial_rotary_factor, 1.0),
        ("qk_norm", model.qk_norm, False),
        ("attention.bias", model.attention.bias, False),
    ):
        if value != unset:
            cure = "null" if unset is None else str(unset).lower()
            raise ConfigError(
                f"model.{name}={value} is not for latent attention ({rank}): set model.{name}={cure}, "
                "or model.latent.kv_lora_rank=null"
            )


def _check_views(model: ModelConfig) -> None:
    attention = model.attention
    if attention.full_every is not None and attention.sliding_window is None:
        raise ConfigError(
            f"model.attention.full_every={attention.full_every} excepts blocks from a window that there is not: "
            "set model.attention.sliding_window, or model.attention.full_every=null"
        )


def _check_rope(model: ModelConfig) -> None:
    scaling, name = model.rope_scaling, "model.rope_scaling"
    for key, unset in (("factor", 1.0), ("attention_factor", 1.0), ("mscale_all_dim", 0.0)):
        value = getattr(scaling, key)
        if scaling.rope_type == "none" and value != unset:
            raise ConfigError(
                f"{name}.{key}={value} without a kind of scaling: set {name}.rope_type=yarn, linear or llama3, "
                f"or {name}.{key}={unset}"
            )
    slow, fast = scaling.slow_turns, scaling.fast_turns
    if (scaling.rope_type == "yarn" and slow > fast) or (scaling.rope_type == "llama3" and slow >= fast):
        raise ConfigError(f"{name}.slow_turns={slow} must be below {name}.fast_turns={fast}")
    if scaling.mscale_all_dim and not model.has_latents:
        raise ConfigError(
            f"{name}.mscale_all_dim={scaling.mscale_all_dim} is for latent attention: "
            f"set model.latent.kv_lora_rank, or {name}.mscale_all_dim=0"
        )


def _check_experts(model: ModelConfig) -> None:
    moe = model.moe
    if moe.num_experts == 0:
        if moe.expert_matmuls != "compute_dtype":
            raise ConfigError(
                f"model.moe.expert_matmuls={moe.expert_matmuls}, and with model.moe.num_experts=0 there are no "
                "experts: set model.moe.num_experts, or model.moe.expert_matmuls=compute_dtype"
            )
        return
    if moe.shared_gate and not moe.num_shared_experts:
        raise ConfigError(
            "model.moe.shared_gate=true without shared experts: set model.moe.num_shared_experts, or "
            "model.moe.shared_gate=false"
        )
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"model.moe.top_k={moe.top_k} must be 1..model.moe.num_experts={moe.num_experts}")
    check_gate(moe)
    if moe.first_k_dense_replace >= model.num_layers:
        raise ConfigError(
            f"model.moe.first_k_dense_replace={moe.first_k_dense_replace} leaves none of "
            f"model.num_layers={model.num_layers} "
            f"for experts: use 0..{model.num_layers - 1}, or model.moe.num_experts=0 for a dense model"
        )
    if moe.moe_layer_freq > model.num_layers - moe.first_k_dense_replace:
        raise ConfigError(
            f"model.moe.moe_layer_freq={moe.moe_layer_freq} puts experts in none of "
            f"the {model.num_layers - moe.first_k_dense_replace} blocks: "
            f"use 1..{model.num_layers - moe.first_k_dense_replace}, or model.moe.num_experts=0 for a dense model"
        )


_NUMBER, _SCALE = "model.num_nextn_predict_layers", "train.mtp_loss_scaling_factor"
_CHANGES = "train.mtp_loss_schedule"


def check_mtp(config: Sections) -> None:
    """Raise ConfigError for settings of multi-token prediction without it, and for steps that do not support it."""
    train, changes = config.train, [list(pair) for pair in config.train.mtp_loss_schedule]
    check_changes(_CHANGES, train.mtp_loss_schedule, RANGES[_SCALE], "a weight", [[10000, 0.1]])
    if not config.model.has_mtp:
        for name, value, unset in (
            (_SCALE, train.mtp_loss_scaling_factor, TrainConfig.mtp_loss_scaling_factor),
            (_CHANGES, changes, []),
        ):
            if value != unset:
                raise ConfigError(
                    f"{name}={value} is for multi-token prediction, and {_NUMBER}=0: set {_NUMBER}=1, or {name}={unset}"
                )
        return
    for name in ("record_routing", "replay_routing"):
        if (folder := getattr(train, name)) is not None:
            raise ConfigError(
                f"train.{name}={folder} has the experts of the decoder's blocks, and {_NUMBER}=1: use {_NUMBER}=0, or "
                f"train.{name}=null"
            )
