"""Rules for the model: attention heads, rotary embedding, experts and their blocks, multi-token prediction."""

import dataclasses
import functools
import math

from moe_jax.config.registry import DISPATCHER_FACTS, GATE_FACTS
from moe_jax.config.sections import AttentionConfig, ModelConfig, MoEConfig, Sections, TrainConfig
from moe_jax.config.validate.ranges import RANGES, check_changes, check_number
from moe_jax.config.validate.recurrent import check_delta_nets, check_mamba
from moe_jax.errors import ConfigError, all_of, as_yaml, divisors_text


@functools.lru_cache(maxsize=64)
def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for invalid heads, latents, recurrent layers, windows, rotary scaling or experts."""
    if model.has_latents:
        _check_latents(model)
    else:
        _check_heads(model)
    check_delta_nets(model)
    check_mamba(model)
    _check_views(model)
    _check_norms(model)
    _check_rope(model)
    _check_experts(model)


def _check_heads(model: ModelConfig) -> None:
    if model.latent.q_lora_rank is not None:
        raise ConfigError(
            f"model.latent.q_lora_rank={model.latent.q_lora_rank} without model.latent.kv_lora_rank: "
            "set both, or model.latent.q_lora_rank=null"
        )
    for field in dataclasses.fields(model.latent):
        if (value := getattr(model.latent, field.name)) != field.default:
            raise ConfigError(
                f"model.latent.{field.name}={as_yaml(value)} is for latent attention: set model.latent.kv_lora_rank, "
                f"or model.latent.{field.name}={as_yaml(field.default)}"
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
        ("qk_norm_after_rope", model.qk_norm_after_rope, False),
        ("qk_l2_norm", model.qk_l2_norm, False),
        ("attention.attn_scale", model.attention.attn_scale, 0.0),
        ("attention.bias", model.attention.bias, False),
        ("attention.output_gate", model.attention.output_gate, False),
    ):
        if value != unset:
            raise ConfigError(
                f"model.{name}={as_yaml(value)} is not for latent attention ({rank}): set "
                f"model.{name}={as_yaml(unset)}, or model.latent.kv_lora_rank=null"
            )


def _check_views(model: ModelConfig) -> None:
    attention = model.attention
    name, chunk, window = "model.attention", attention.chunk_size, attention.sliding_window
    if not (attention.bias or attention.out_bias):
        raise ConfigError(
            f"{name}.out_bias=false leaves out one of the biases that {name}.bias=false does not have: set "
            f"{name}.bias=true, or {name}.out_bias=true"
        )
    if attention.full_every is not None and window is None and chunk is None:
        raise ConfigError(
            f"{name}.full_every={attention.full_every} excepts blocks from a window that there is not: "
            f"set {name}.sliding_window or {name}.chunk_size, or {name}.full_every=null"
        )
    if chunk is not None and window is not None:
        raise ConfigError(
            f"{name}.chunk_size={chunk} and {name}.sliding_window={window} both limit what a token attends to: set one "
            "of them to null"
        )
    if attention.attn_scale and attention.nope_every is None:
        raise ConfigError(
            f"{name}.attn_scale={attention.attn_scale} is for blocks without rotary embedding: set {name}.nope_every, "
            f"or {name}.attn_scale=0"
        )
    if not attention.attn_scale and attention.floor_scale != AttentionConfig.floor_scale:
        raise ConfigError(
            f"{name}.floor_scale={attention.floor_scale} is of {name}.attn_scale: set both, or "
            f"{name}.floor_scale={AttentionConfig.floor_scale}"
        )


def _check_norms(model: ModelConfig) -> None:
    if model.qk_l2_norm and model.qk_norm:
        raise ConfigError(
            "model.qk_l2_norm=true and model.qk_norm=true are two norms of queries and keys: use one of them"
        )
    if model.qk_norm_over != "head" and not model.qk_norm:
        raise ConfigError(
            f"model.qk_norm_over={model.qk_norm_over} without norms of queries and keys: set model.qk_norm=true, or "
            "model.qk_norm_over=head"
        )
    if model.normalization == "rmsnorm":
        return
    for name, value, unset, reason in (
        ("rms_norm_zero_centered", model.rms_norm_zero_centered, "false", "is for RMSNorms"),
        ("num_nextn_predict_layers", model.num_nextn_predict_layers, "0", "has RMSNorms"),
    ):
        if value:
            raise ConfigError(
                f"model.{name}={as_yaml(value)} {reason}, and model.normalization={model.normalization}: use "
                f"model.{name}={unset}, or model.normalization=rmsnorm"
            )


def _check_long_factors(model: ModelConfig) -> None:
    """Raise ConfigError unless LongRoPE has a number for each pair of features, and nothing else has any."""
    scaling, pairs = model.rope_scaling, model.rotary_width // 2
    for key in ("short_factor", "long_factor"):
        name, value = f"model.rope_scaling.{key}", getattr(scaling, key)
        if scaling.rope_type != "longrope":
            if value:
                raise ConfigError(
                    f"{name} is of model.rope_scaling.rope_type=longrope, which is {scaling.rope_type}: set that, or "
                    f"{name}=[]"
                )
            continue
        if len(value) != pairs:
            raise ConfigError(
                f"{name} has {len(value)} numbers, and model.rope_scaling.rope_type=longrope scales {pairs} pairs of "
                f"features: use {pairs}"
            )
        for number, each in enumerate(value):
            check_number(f"{name}[{number}]", each, RANGES[name], "")


def _check_rope(model: ModelConfig) -> None:
    _check_long_factors(model)
    scaling, name = model.rope_scaling, "model.rope_scaling"
    for field in dataclasses.fields(scaling):
        key, value, unset = field.name, getattr(scaling, field.name), field.default
        if scaling.rope_type == "none" and value != unset:
            raise ConfigError(
                f"{name}.{key}={as_yaml(value)} without a kind of scaling: "
                f"set {name}.rope_type=yarn, linear or llama3, or {name}.{key}={as_yaml(unset)}"
            )
    slow, fast = scaling.slow_turns, scaling.fast_turns
    if scaling.rope_type in ("yarn", "llama3") and slow > fast:
        raise ConfigError(f"{name}.slow_turns={slow} must be at most {name}.fast_turns={fast}")
    if scaling.mscale_all_dim and not model.has_latents:
        raise ConfigError(
            f"{name}.mscale_all_dim={scaling.mscale_all_dim} is for latent attention: "
            f"set model.latent.kv_lora_rank, or {name}.mscale_all_dim=0"
        )


def _check_experts(model: ModelConfig) -> None:
    moe, mixers = model.moe, list(model.mamba.mixer_only_offsets)
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
    if moe.apply_probs_on_input and (moe.top_k > 1 or moe.gate_facts.fills_slots):
        name, value, needed = ("top_k", moe.top_k, "1") if moe.top_k > 1 else ("gate", moe.gate, "sigmoid")
        raise ConfigError(
            "model.moe.apply_probs_on_input=true is for tokens that choose one expert each, and "
            f"model.moe.{name}={value}: use model.moe.{name}={needed}, or model.moe.apply_probs_on_input=false"
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
    if "moe" not in model.block_kinds:
        raise ConfigError(
            f"model.mamba.mixer_only_offsets={mixers} leaves experts in none of the {model.num_layers} blocks: use "
            "fewer places, or model.moe.num_experts=0 for a model without experts"
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


_SMALL = {1: "one expert", 2: "two"}  # numbers of experts, in words


def check_gate(moe: MoEConfig) -> None:
    """Raise ConfigError if the gate does not work with the capacity or dispatcher, or does not read a setting."""
    for field in dataclasses.fields(moe):
        name, value, unset = field.name, getattr(moe, field.name), field.default
        gates = _gates_reading(name)
        if gates and value != unset and moe.gate not in gates:
            raise ConfigError(
                f"model.moe.{name}={value} is of gate {all_of(gates)}, and model.moe.gate={moe.gate}: "
                f"set model.moe.gate={gates[-1]}, or model.moe.{name}={'null' if unset is None else unset}"
            )
    if moe.gate_facts.group_scorers is not None:
        _check_groups(moe, moe.gate_facts.group_scorers)
    if moe.norm_top1_prob:
        _check_normalize_top_1(moe)
    if moe.gate_facts.ignores_norm and not moe.norm_topk_prob:
        raise ConfigError(
            f"model.moe.norm_topk_prob=false has no effect with model.moe.gate={moe.gate}, which never divides weights "
            "by their sum: use model.moe.norm_topk_prob=true, or another gate"
        )
    _check_capacity_schedule(moe)
    facts = moe.gate_facts
    if not facts.splits and not DISPATCHER_FACTS.of(moe.dispatcher).sorts_rows:
        raise ConfigError(
            f"model.moe.gate={moe.gate} fills slots in an order of its own, and model.moe.dispatcher="
            f"{moe.dispatcher} has another: use model.moe.dispatcher=sort"
        )
    if moe.load_balancing_type == "sequence" and facts.fills_slots:
        raise ConfigError(
            f"model.moe.gate={moe.gate} fills all slots alike, and model.moe.load_balancing_type=sequence balances "
            "what each sequence chose: use model.moe.load_balancing_type=batch, or another gate"
        )
    if moe.capacity_factor is None and not facts.splits and not facts.mixes:
        raise ConfigError(
            f"model.moe.gate={moe.gate} chooses who gets one of few slots, and model.moe.capacity_factor=null limits "
            "none: set model.moe.capacity_factor, or another gate"
        )


@functools.cache
def _gates_reading(name: str) -> tuple[str, ...]:
    """Return the gates that read a setting which not all gates read."""
    return tuple(gate for gate, facts in GATE_FACTS.items() if name in facts.settings)


def _check_normalize_top_1(moe: MoEConfig) -> None:
    facts = moe.gate_facts
    name, value, needed = "top_k", str(moe.top_k), "1"
    if moe.top_k == 1:
        if moe.norm_topk_prob and not facts.fills_slots and not facts.ignores_norm:
            return
        name, value, needed = "gate", moe.gate, "softmax"
        if not moe.norm_topk_prob:
            name, value, needed = "norm_topk_prob", "false", "true"
    raise ConfigError(
        f"model.moe.norm_top1_prob=true has no effect with model.moe.{name}={value}: use model.moe.{name}={needed}, "
        "or model.moe.norm_top1_prob=false"
    )


def _check_capacity_schedule(moe: MoEConfig) -> None:
    schedule, name = moe.capacity_schedule, "model.moe.capacity_schedule"
    if not schedule:
        return
    allowed = RANGES["model.moe.capacity_factor"]
    check_changes(name, schedule, allowed, "a factor", [[1000, 1.5], [5000, 1.0]])
    text = f"{name}={[list(pair) for pair in schedule]}"
    if moe.capacity_factor is None or moe.gate_facts.mixes:
        name, value = ("capacity_factor", "null") if moe.capacity_factor is None else ("gate", moe.gate)
        raise ConfigError(
            f"{text} changes a capacity that there is not with model.moe.{name}={value}: set another, or "
            "model.moe.capacity_schedule=[]"
        )


def _check_groups(moe: MoEConfig, scorers: int) -> None:
    groups, top = moe.n_group, moe.topk_group
    if moe.num_experts % groups:
        raise ConfigError(
            f"model.moe.num_experts={moe.num_experts} is not divisible by model.moe.n_group={groups}: "
            f"use {divisors_text(moe.num_experts)} groups"
        )
    if top > groups:
        raise ConfigError(f"model.moe.topk_group={top} must be 1..model.moe.n_group={groups}")
    size = moe.num_experts // groups
    if moe.top_k > top * size:
        raise ConfigError(
            f"model.moe.top_k={moe.top_k} experts are not in model.moe.topk_group={top} of {size} experts each: "
            f"use model.moe.topk_group={-(-moe.top_k // size)} or more, or model.moe.top_k={top * size} or less"
        )
    if top < groups and size < scorers:
        fewest = min(GATE_FACTS, key=lambda gate: GATE_FACTS[gate].group_scorers or math.inf)
        raise ConfigError(
            f"model.moe.n_group={groups} leaves {_SMALL.get(size, f'{size} experts')} in each group, and gate "
            f"{moe.gate} scores a group by {_SMALL.get(scorers, scorers)}: use "
            f"model.moe.n_group={moe.num_experts // scorers} or less, or model.moe.gate={fewest}"
        )
