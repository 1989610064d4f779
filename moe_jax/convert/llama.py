"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): dense."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, dense_or_upcycled
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings


def _model(hf: HfConfig) -> ModelConfig:
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        attention=AttentionConfig(bias=hf.flag("attention_bias", False)),
        moe=MoEConfig(num_experts=0),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "attention_bias": model.attention.bias,
    }


_DEFAULTS = {"max_position_embeddings": 2048}
FAMILY = Family("llama", "LlamaForCausalLM", _model, _settings, dense_or_upcycled, _DEFAULTS)
