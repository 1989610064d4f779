"""DeepSeek-V3 (2024) and models of the same architecture: sigmoid scores, and a bias in the choice of experts."""

from typing import Any

from moe_jax.config import ModelConfig
from moe_jax.convert import deepseek
from moe_jax.convert.deepseek import biased_router, router_rows, router_settings
from moe_jax.convert.family import Family
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.tensors import Tensor


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("rope_interleave", True)
    return ModelConfig(**deepseek.model_settings(hf), moe=biased_router(hf))


def _settings(model: ModelConfig) -> dict[str, Any]:
    return deepseek.settings(model) | router_settings(model) | {"rope_interleave": True}


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [*deepseek.attention_rows(model), *router_rows(model, kind)]


_DEFAULTS = {
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
}
_ALIASES = ("kimi_k2",)  # Kimi K2 (Moonshot AI 2025) has the class of DeepSeek-V3
FAMILY = Family("deepseek_v3", "DeepseekV3ForCausalLM", _model, _settings, _block, _DEFAULTS, True, _ALIASES)
