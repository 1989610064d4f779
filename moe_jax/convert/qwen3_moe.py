"""Qwen3 with experts (Qwen Team 2025)."""

from typing import Any

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.convert.family import Family, dense_or_experts, expert_block_settings, top_k_settings
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.qwen3 import qwen3_settings
from moe_jax.convert.shared import hf_settings


def _model(hf: HfConfig) -> ModelConfig:
    return ModelConfig(
        **qwen3_settings(hf),
        intermediate_size=hf.whole("intermediate_size"),
        moe=MoEConfig(
            num_experts=hf.whole("num_experts", "num_local_experts"),
            **top_k_settings(hf, hf.flag("norm_topk_prob", False)),
            intermediate_size=hf.whole("moe_intermediate_size"),
            capacity_factor=None,
            **expert_block_settings(hf),
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | qwen_moe_settings(model) | {"attention_bias": model.attention.bias}


def qwen_moe_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings for config.json that Qwen's models with experts share."""
    moe, dense = model.moe, [i for i, kind in enumerate(model.block_kinds) if kind == "dense"]
    return {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "use_sliding_window": False,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.divides_by_sum,
        "decoder_sparse_step": 1 if moe.first_k_dense_replace else moe.moe_layer_freq,
        "mlp_only_layers": dense if moe.first_k_dense_replace else [],
    }


_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", _model, _settings, dense_or_experts, _DEFAULTS)
