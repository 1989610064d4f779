"""OLMoE (Muennighoff et al. 2024): norms over all queries and over all keys."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, dense_or_experts, top_k_settings
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("clip_qkv")
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        qk_norm=True,
        qk_norm_over="projection",
        attention=AttentionConfig(bias=hf.flag("attention_bias", False)),
        moe=MoEConfig(
            num_experts=hf.whole("num_experts", "num_local_experts"),
            **top_k_settings(hf, hf.flag("norm_topk_prob", False)),
            intermediate_size=hf.whole("intermediate_size"),
            capacity_factor=None,
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "attention_bias": model.attention.bias,
        "intermediate_size": model.moe.intermediate_size,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "norm_topk_prob": model.moe.divides_by_sum,
    }


_DEFAULTS = {"max_position_embeddings": 4096}
FAMILY = Family("olmoe", "OlmoeForCausalLM", _model, _settings, dense_or_experts, _DEFAULTS)
