"""GLM-4.7-Flash (Z.ai 2026): the architecture of DeepSeek-V3, with a list of the blocks that have experts."""

from typing import Any

from moe_jax.config import ModelConfig
from moe_jax.convert import deepseek
from moe_jax.convert.deepseek import DENSE, SPARSE, biased_router, lowest_dense_blocks, router_rows, router_settings
from moe_jax.convert.family import Family
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.tensors import Tensor


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("rope_interleave", True)
    dense = lowest_dense_blocks(hf, default=1)
    hf.only("first_k_dense_replace", dense)  # transformers ignores it
    own = hf.with_values({"first_k_dense_replace": dense})
    return ModelConfig(**deepseek.model_settings(own), moe=biased_router(own))


def _settings(model: ModelConfig) -> dict[str, Any]:
    kinds = [SPARSE if kind == "moe" else DENSE for kind in model.block_kinds]
    settings = deepseek.settings(model) | router_settings(model)
    return settings | {"rope_interleave": True, "mlp_layer_types": kinds}


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [*deepseek.attention_rows(model), *router_rows(model, kind)]


_DEFAULTS = {
    "max_position_embeddings": 202_752,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "q_lora_rank": 768,
}
FAMILY = Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _model, _settings, _block, _DEFAULTS)
