"""Mistral (Jiang et al. 2023): dense, with a window in all blocks or in none."""

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
        attention=AttentionConfig(sliding_window=hf.whole("sliding_window") if hf.has("sliding_window") else None),
        moe=MoEConfig(num_experts=0),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "sliding_window": model.attention.sliding_window,
    }


_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
FAMILY = Family("mistral", "MistralForCausalLM", _model, _settings, dense_or_upcycled, _DEFAULTS)
