"""All supported families, and the choice of the family for a model."""

import dataclasses
from typing import Any

from moe_jax.config import ModelConfig
from moe_jax.config.facts import SCORE_BIAS
from moe_jax.config.gates import gate_parameters
from moe_jax.convert import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_moe,
    llama,
    llama4,
    minimax_m2,
    mistral,
    mixtral,
    nemotron_h,
    olmoe,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from moe_jax.convert.family import Family, expert_block_pattern
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.mamba import BlockParts, block_pattern

_MODULES = (
    *(mixtral, llama, qwen3, qwen2, mistral, qwen3_moe, olmoe, qwen2_moe, deepseek_v3, deepseek_v2, gpt_oss),
    *(dots1, glm4_moe, minimax_m2, ernie4_5_moe, granitemoe, glm4_moe_lite, hunyuan_v1_moe, qwen3_next, qwen3_5_moe),
    *(phimoe, llama4, granitemoehybrid, nemotron_h),
)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
_BY_TYPE = (
    FAMILIES
    | {name: family for family in FAMILIES.values() for name in family.aliases}
    | deepseek_v32.FAMILIES  # which are not written
)

# families that are not supported, and the first of their features that there is not
_NOT_BUILT = {
    "minimax": "lightning attention (MiniMax-01)",
    "kimi_linear": "delta net that decays each feature by itself (Kimi Linear)",
    "jamba": "Mamba-1 (Jamba)",
    "afmoe": "norms after attention and experts (Trinity)",
    "axk1": "norm after experts (A.X K1)",
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), "fused projection of queries, keys and values (Ling)"),
    "bailing_hybrid": "delta net that decays each feature by itself (Ling 2.5)",
    "deepseek_v4": "compressed attention or hyper-connections (DeepSeek-V4)",
    **dict.fromkeys(("exaone_moe", "seed_oss", "solar_open"), "table of its tensors"),
    "jetmoe": "experts of attention (JetMoE)",
    "kimi_k25": "language model read out of its files, which also see images (Kimi K2.5)",
    "lfm2_moe": "short convolution in place of attention (LFM2)",
    "longcat_flash": "block with two attentions, nor experts that compute nothing (LongCat-Flash)",
    "mimo_v2_flash": "block with other numbers of heads than the next (MiMo-V2-Flash)",
    "minimax_m3_vl": "sparse attention of its kind (MiniMax-M3)",
    **dict.fromkeys(("step3", "step3_text", "step3_vl"), "attention with factored queries (Step-3)"),
    "dbrx": "norms that subtract the mean (DBRX)",
    "flex_olmo": "norms after attention and experts (FlexOlmo)",
    "grok-1": "norms after attention and experts (Grok-1)",
}

# settings of `model.moe` that affect training or the capacity, but not the function that a checkpoint stores
_TRAINING = {
    *("capacity_factor", "capacity_schedule", "dispatcher", "hooks", "aux_loss_coeff", "load_balancing_type"),
    *("expert_matmuls", "bias_update_rate", "z_loss_coeff"),
}

_UNUSED = "unused"  # stands for the value of a setting that has no effect in a model


def family_of(hf: HfConfig) -> Family:
    """Return the family that config.json names. Raises ConvertError if it is not supported."""
    name = hf.word("model_type")
    if name in _NOT_BUILT:
        raise ConvertError(
            f"{hf.where}: model_type={name!r} is not supported, since there is no {_NOT_BUILT[name]}: use a model of "
            f"{', '.join(_BY_TYPE)}"
        )
    if name not in _BY_TYPE:
        raise ConvertError(f"{hf.where}: model_type={name!r} is not supported: it must be {', '.join(_BY_TYPE)}")
    return _BY_TYPE[name]


def family_that_holds(model: ModelConfig, name: str | None = None) -> Family:
    """Return the family of this name, or the first family, whose files can represent a model.

    Raises ConvertError if there is none.
    """
    if name is not None and name not in FAMILIES:
        other = f"use {_BY_TYPE[name].model_type}" if name in _BY_TYPE else f"it must be {', '.join(FAMILIES)}"
        raise ConvertError(f"--family={name} is not supported: {other}")
    reasons, decoder = {}, dataclasses.replace(model, num_nextn_predict_layers=0)
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        try:
            back = family.model(HfConfig(family.settings(decoder), family.model_type))
        except ConvertError as error:
            reasons[family.model_type] = str(error)
            continue
        differs = differences(decoder if family.holds_mtp else model, back)
        if not differs:
            return family
        reasons[family.model_type] = " and ".join(f"{setting}={value}" for setting, (value, _) in differs.items())
    # with as few differences as possible; a model without experts is another kind of model
    nearest = min(reasons, key=lambda each: ("num_experts=" in reasons[each], len(reasons[each])))
    raise ConvertError(
        f"no files of {name or 'any family'} hold this model; nearest are those of {nearest}, which have no "
        f"{reasons[nearest]}: change that, and train it so"
    )


def differences(here: ModelConfig, there: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that make two models different functions of their tokens, with the values of both."""
    mine, others = _effective_settings(here), _effective_settings(there)
    return {
        f"model.{name}": (value, others[name])
        for name, value in mine.items()
        if others[name] != value and _UNUSED not in (value, others[name])  # the setting that decides this differs, too
    }


def _effective_settings(model: ModelConfig) -> dict[str, Any]:
    """Return a model's settings by name: defaults are resolved, and settings without effect are `_UNUSED`."""
    found = _flat(model, "")
    found |= {"num_key_value_heads": model.kv_heads, "head_dim": model.head_width}
    found["attention_multiplier"] = model.attention_multiplier or model.qk_width**-0.5
    if model.has_latents:
        found["latent.rms_norm_eps"] = model.latent.rms_norm_eps or model.rms_norm_eps
        unused = {"num_key_value_heads", "head_dim", "partial_rotary_factor"}
    else:
        unused = {name for name in found if name.startswith("latent.")} - {"latent.kv_lora_rank"}
    if model.rope_scaling.rope_type == "none":
        unused |= {name for name in found if name.startswith("rope_scaling.")} - {"rope_scaling.rope_type"}
    if not model.qk_norm:
        unused |= {"qk_norm_over", "qk_norm_after_rope"}
    if not model.attention.bias:
        unused.add("attention.out_bias")
    if model.has_delta_nets:
        found["delta_net.num_key_heads"] = model.delta_net.key_heads
        if all(view.is_recurrent for view in model.views):  # the interval is longer than the model, or there is none
            found["delta_net.full_attention_interval"] = None
    else:
        unused |= {name for name in found if name.startswith("delta_net.")} - {"delta_net.num_value_heads"}
    if model.has_mamba:  # different numbers may give the same blocks
        pattern_of_blocks = block_pattern([BlockParts(not view.is_recurrent, view.has_mlp) for view in model.views])
        found |= {f"mamba.{name}": value for name, value in pattern_of_blocks.items()}
    else:
        unused |= {name for name in found if name.startswith("mamba.")} - {"mamba.num_heads"}
    if all(view.is_recurrent for view in model.views):
        unused.add("attention.nope_every")
    if not any(view.rope for view in model.views):
        unused |= {"rope_theta", "partial_rotary_factor"}
        unused |= {name for name in found if name.startswith("rope_scaling.")}
    if not model.num_mlp_blocks and not model.moe.dense_residual:
        unused.add("intermediate_size")
    if model.attention.sliding_window is None and model.attention.chunk_size is None:
        unused.add("attention.full_every")
    if not model.attention.attn_scale:
        unused.add("attention.floor_scale")
    if model.moe.num_experts == 0:
        unused |= {name for name in found if name.startswith("moe.")} - {"moe.num_experts"}
    else:
        if model.moe.topk_group == model.moe.n_group:
            found |= {"moe.n_group": 1, "moe.topk_group": 1}  # experts of all groups can be chosen
        blocks = zip(model.block_kinds[: model.num_layers], model.views, strict=False)
        pattern = expert_block_pattern([kind == "moe" if view.has_mlp else None for kind, view in blocks])
        if pattern is not None:  # different numbers may give the same blocks
            found["moe.first_k_dense_replace"], found["moe.moe_layer_freq"] = pattern
        found["moe.norm_top1_prob"] = model.moe.divides_by_sum
        unused.add("moe.norm_topk_prob" if model.moe.top_k == 1 else "moe.norm_top1_prob")
        if model.moe.gate_facts.sums_to_1 or model.moe.gate_facts.ignores_norm:
            unused |= {"moe.norm_topk_prob", "moe.norm_top1_prob"}
    found["moe.score_bias"] = model.moe.num_experts > 0 and SCORE_BIAS.name in gate_parameters(model)
    return {name: _UNUSED if name in unused else value for name, value in found.items()}


def _flat(section: Any, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            found |= _flat(value, f"{prefix}{field.name}.")
        elif not (prefix == "moe." and field.name in _TRAINING):
            found[f"{prefix}{field.name}"] = value
    return found
