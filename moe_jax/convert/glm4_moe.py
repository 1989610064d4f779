"""GLM-4.5 (Z.ai 2025) and later: half of each head is rotated; the router and shared experts of DeepSeek-V3."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig
from moe_jax.convert.deepseek import biased_router, router_rows, router_settings
from moe_jax.convert.family import Family, attention_rows
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor


def _model(hf: HfConfig) -> ModelConfig:
    bias = hf.flag("attention_bias", False)
    return ModelConfig(
        **shared_settings(hf, partial_rotation=True),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        qk_norm=hf.flag("use_qk_norm", False),
        attention=AttentionConfig(bias=bias, out_bias=not bias),
        moe=biased_router(hf),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return (
        hf_settings(model)
        | router_settings(model)
        | {
            "head_dim": model.head_width,
            "partial_rotary_factor": model.partial_rotary_factor,
            "attention_bias": model.attention.bias,
            "use_qk_norm": model.qk_norm,
        }
    )


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [*attention_rows(model), *router_rows(model, kind)]


_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
FAMILY = Family("glm4_moe", "Glm4MoeForCausalLM", _model, _settings, _block, _DEFAULTS, holds_mtp=True)
