"""Mixtral (Jiang et al. 2024)."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, mlp_rows, top_k_settings
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor


def _model(hf: HfConfig) -> ModelConfig:
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        attention=AttentionConfig(sliding_window=hf.whole("sliding_window") if hf.has("sliding_window") else None),
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            **top_k_settings(hf, normalized=True),
            intermediate_size=hf.whole("intermediate_size"),
            capacity_factor=None,
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "sliding_window": model.attention.sliding_window,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.intermediate_size,
    }


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [
        *attention_rows(model),
        Tensor("block_sparse_moe.gate.weight", "moe.router", "choices model"),
        *mlp_rows("block_sparse_moe.experts.{expert}", "moe.experts", ("w1", "w3", "w2")),
    ]


_DEFAULTS = {"rope_theta": 1e6, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
FAMILY = Family("mixtral", "MixtralForCausalLM", _model, _settings, _block, _DEFAULTS)
