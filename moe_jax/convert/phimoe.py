"""Phi-3.5-MoE (Microsoft 2024): SparseMixer's router, LayerNorms, biases of attention and of the head, LongRoPE.

transformers 5.24 uses `short_factor` also for sequences longer than those of pre-training. We use `long_factor` for
them, as the published code does.
"""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert import mixtral
from moe_jax.convert.family import Family
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, shared_settings

GATE, _CHOICES = "sparsemixer", 2


def _model(hf: HfConfig) -> ModelConfig:
    if (top_k := hf.whole("num_experts_per_tok")) != _CHOICES:
        raise ConvertError(f"{hf.where}: num_experts_per_tok={top_k} is not supported: it must be {_CHOICES}")
    return ModelConfig(
        **shared_settings(hf, longrope=True),
        **grouped_heads(hf),
        normalization="layernorm",
        head_bias=hf.flag("lm_head_bias", False),
        attention=AttentionConfig(
            bias=hf.flag("attention_bias", False),
            sliding_window=hf.whole("sliding_window") if hf.has("sliding_window") else None,
        ),
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            top_k=_CHOICES,
            intermediate_size=hf.whole("intermediate_size"),
            gate=GATE,
            router_jitter_noise=hf.number("router_jitter_noise", MoEConfig.router_jitter_noise),
            capacity_factor=None,
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return mixtral.FAMILY.settings(model) | {
        "attention_bias": model.attention.bias,
        "lm_head_bias": model.head_bias,
        "router_jitter_noise": model.moe.router_jitter_noise,
    }


FAMILY = Family(
    *("phimoe", "PhimoeForCausalLM", _model, _settings, mixtral.FAMILY.block, mixtral.FAMILY.defaults),
)
