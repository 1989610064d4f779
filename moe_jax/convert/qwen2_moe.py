"""Qwen2-MoE (Yang et al. 2024): biases of queries, keys and values, and shared experts with a gate."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import (
    Family,
    check_no_windows,
    dense_or_experts,
    expert_block_settings,
    top_k_settings,
)
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.qwen3_moe import gated_shared_experts, gated_shared_rows, qwen_moe_settings, shared_width
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor


def _model(hf: HfConfig) -> ModelConfig:
    check_no_windows(hf)
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        attention=AttentionConfig(bias=hf.flag("qkv_bias", True), out_bias=False),
        moe=MoEConfig(
            num_experts=hf.whole("num_experts", "num_local_experts"),
            **top_k_settings(hf, hf.flag("norm_topk_prob", False)),
            **gated_shared_experts(hf),
            capacity_factor=None,
            **expert_block_settings(hf),
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | qwen_moe_settings(model) | shared_width(model) | {"qkv_bias": model.attention.bias}


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [*dense_or_experts(model, kind), *(gated_shared_rows() if kind == "moe" else [])]


_DEFAULTS = {"num_key_value_heads": 16, "max_position_embeddings": 32_768}
FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", _model, _settings, _block, _DEFAULTS)
