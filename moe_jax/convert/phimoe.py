"""Phi-3.5-MoE (Microsoft 2024): SparseMixer's router, LayerNorms, biases of attention and of the head, LongRoPE.

transformers 5.24 uses `short_factor` also for sequences longer than those of pre-training. We use `long_factor` for
them, as the published code does.
"""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, mlp_rows
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor

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
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "attention_bias": model.attention.bias,
        "lm_head_bias": model.head_bias,
        "sliding_window": model.attention.sliding_window,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "router_jitter_noise": model.moe.router_jitter_noise,
        "intermediate_size": model.moe.intermediate_size,
    }


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [
        *attention_rows(model),
        Tensor("block_sparse_moe.gate.weight", "moe.router", "choices model"),
        *mlp_rows("block_sparse_moe.experts.{expert}", "moe.experts", ("w1", "w3", "w2")),
    ]


_DEFAULTS = {"rope_theta": 1e6, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
FAMILY = Family("phimoe", "PhimoeForCausalLM", _model, _settings, _block, _DEFAULTS)
