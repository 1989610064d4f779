"""Hunyuan-A13B (Tencent 2025): norms of each head's queries and keys after their rotation, a shared expert."""

import dataclasses
from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, mlp_rows
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor

_ROPE = ("rope_scaling", "rope_parameters")
_MOST_ALPHA = 1e9
_NAMES = {"self_attn.q_norm.weight": "query", "self_attn.k_norm.weight": "key"}  # our name of the projection


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("use_qk_norm", True)
    hf.only("use_cla", False)
    hf.only("use_mla", False)
    hf.only("moe_layer_num_skipped", 0)
    own = hf.with_values(_without_alpha(hf))
    top_k = _of_all_blocks(hf, "moe_topk", "num_experts_per_tok")
    return ModelConfig(
        **shared_settings(own),
        **grouped_heads(own),
        qk_norm=True,
        qk_norm_after_rope=True,
        attention=AttentionConfig(bias=hf.flag("attention_bias", False)),
        moe=MoEConfig(
            num_experts=_of_all_blocks(hf, "num_experts", "num_local_experts"),
            top_k=top_k,
            norm_top1_prob=top_k == 1,
            intermediate_size=hf.whole("intermediate_size"),
            num_shared_experts=1,
            capacity_factor=None,
        ),
    )


def _without_alpha(hf: HfConfig) -> dict[str, Any]:
    """Return the sections of the rotation without `alpha`, which only stretches the base (NTK-aware scaling)."""
    found: dict[str, Any] = {}
    for name in _ROPE:
        rope = hf.section(name)
        if rope is None or not rope.has("alpha"):
            continue
        if (kind := rope.word("rope_type", rope.word("type", "dynamic"))) != "dynamic":
            raise ConvertError(f"{rope.where}: alpha with rope_type={kind} is not supported: it must be dynamic")
        alpha = rope.number("alpha")
        if not 0 < alpha <= _MOST_ALPHA:
            raise ConvertError(f"{rope.where}: alpha={alpha:g} must be above 0, and at most {_MOST_ALPHA:g}")
        width = hf.whole("head_dim", default=hf.whole("hidden_size") // max(hf.whole("num_attention_heads"), 1))
        theta = rope.number("rope_theta", hf.number("rope_theta", 10_000.0))
        stretched = theta * alpha ** (width / max(width - 2, 1))
        found[name] = {"rope_type": "default", "rope_theta": stretched}
    return found


def _of_all_blocks(hf: HfConfig, *names: str) -> int:
    """Return a number that may be written once, or for each block."""
    for name in names:
        if each := hf.listed_or_none(name):
            if len(set(each)) > 1:
                raise ConvertError(f"{hf.where}: {name} is not supported: it must be the same in all blocks")
            hf = hf.with_values({name: each[0]})
    return hf.whole(*names)


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "attention_bias": model.attention.bias,
        "use_qk_norm": True,
        "num_experts": model.moe.num_experts,
        "moe_topk": model.moe.top_k,
        "intermediate_size": model.moe.intermediate_size,
    }


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    attention = [
        dataclasses.replace(row, name=f"self_attn.{_NAMES[row.name]}_layernorm.weight") if row.name in _NAMES else row
        for row in attention_rows(model)
    ]
    return [
        *attention,
        Tensor("mlp.gate.wg.weight", "moe.router", "choices model"),
        *mlp_rows("mlp.experts.{expert}", "moe.experts"),
        *mlp_rows("mlp.shared_mlp", "moe.shared"),
    ]


_DEFAULTS = {"max_position_embeddings": 2048}
FAMILY = Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _model, _settings, _block, _DEFAULTS)
