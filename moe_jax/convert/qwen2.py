"""Qwen2 and 2.5 (Yang et al. 2024): dense, with biases of queries, keys and values."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, check_no_windows, dense_or_upcycled
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings


def _model(hf: HfConfig) -> ModelConfig:
    check_no_windows(hf)
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        attention=AttentionConfig(bias=True, out_bias=False),
        moe=MoEConfig(num_experts=0),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "use_sliding_window": False,
    }


_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
FAMILY = Family("qwen2", "Qwen2ForCausalLM", _model, _settings, dense_or_upcycled, _DEFAULTS)
