"""Qwen3 (Qwen Team 2025): dense, with norms of each head's queries and keys."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, check_no_windows, dense_or_upcycled
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings


def _model(hf: HfConfig) -> ModelConfig:
    return ModelConfig(
        **qwen3_settings(hf), intermediate_size=hf.whole("intermediate_size"), moe=MoEConfig(num_experts=0)
    )


def qwen3_settings(hf: HfConfig) -> dict[str, Any]:
    """Return the arguments of ModelConfig except those of the MLP and experts."""
    check_no_windows(hf)
    hf.whole("head_dim")  # required: transformers' default is not hidden_size / heads
    attention = AttentionConfig(bias=hf.flag("attention_bias", False))
    return {**shared_settings(hf), **grouped_heads(hf), "qk_norm": True, "attention": attention}


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "attention_bias": model.attention.bias,
        "use_sliding_window": False,
    }


_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
FAMILY = Family("qwen3", "Qwen3ForCausalLM", _model, _settings, dense_or_upcycled, _DEFAULTS)
