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
        **factors(hf),
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            **top_k_settings(hf, normalized=True),
            intermediate_size=hf.whole("intermediate_size"),
            capacity_factor=None,
        ),
    )


def factors(hf: HfConfig) -> dict[str, Any]:
    """Return the factors on embeddings, attention, residuals and logits."""
    return {name: hf.number(name, 1.0) for name in _FACTORS}


def granite_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings for config.json of a Granite with experts."""
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
    return [*attention_rows(model), *expert_rows(model)]


def expert_rows(model: ModelConfig) -> list[Tensor]:
    """Return the rows of the router and of all experts, which are two tensors."""
    name, path = "block_sparse_moe", "moe.experts"
    return [
        Tensor(f"{name}.router.layer.weight", "moe.router", "choices model"),
        *input_rows(f"{name}.input_linear.weight", path, model.moe.intermediate_size, "experts hidden model"),
        Tensor(f"{name}.output_linear.weight", f"{path}.down", "experts model hidden"),
    ]


def input_rows(name: str, path: str, hidden: int, axes: str) -> list[Tensor]:
    """Return the rows of the gate and up matrices of MLPs of a hidden width, which are one tensor."""
    ranges = {"gate": range(hidden), "up": range(hidden, 2 * hidden)}
    return [
        Tensor(name, f"{path}.{own}", axes, TensorRange("hidden", 2 * hidden, (each,))) for own, each in ranges.items()
    ]


_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_DEFAULTS = {"max_position_embeddings": 2048}
FAMILY = Family("granitemoe", "GraniteMoeForCausalLM", _model, granite_settings, _block, _DEFAULTS)
