"""Granite 3 with experts (IBM 2024): Mixtral's router, and factors on embeddings, attention, residuals and logits."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, top_k_settings
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange


def _model(hf: HfConfig) -> ModelConfig:
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        attention=AttentionConfig(bias=hf.flag("attention_bias", False)),
        **_factors(hf),
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            **top_k_settings(hf, normalized=True),
            intermediate_size=hf.whole("intermediate_size"),
            capacity_factor=None,
        ),
    )


def _factors(hf: HfConfig) -> dict[str, Any]:
    return {name: hf.number(name, 1.0) for name in _FACTORS}


def _settings(model: ModelConfig) -> dict[str, Any]:
    return (
        hf_settings(model)
        | {name: getattr(model, name) for name in _FACTORS}
        | {
            "head_dim": model.head_width,
            "attention_bias": model.attention.bias,
            "attention_multiplier": model.attention_multiplier or model.head_width**-0.5,
            "num_local_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "intermediate_size": model.moe.intermediate_size,
        }
    )


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    hidden = model.moe.intermediate_size
    gate, up = (TensorRange("hidden", 2 * hidden, (range(first, first + hidden),)) for first in (0, hidden))
    both = "block_sparse_moe.input_linear.weight"
    return [
        *attention_rows(model),
        Tensor("block_sparse_moe.router.layer.weight", "moe.router", "choices model"),
        Tensor(both, "moe.experts.gate", "experts hidden model", gate),
        Tensor(both, "moe.experts.up", "experts hidden model", up),
        Tensor("block_sparse_moe.output_linear.weight", "moe.experts.down", "experts model hidden"),
    ]


_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_DEFAULTS = {"max_position_embeddings": 2048}
FAMILY = Family("granitemoe", "GraniteMoeForCausalLM", _model, _settings, _block, _DEFAULTS)
