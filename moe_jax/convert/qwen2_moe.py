"""Qwen2-MoE (Yang et al. 2024): biases of queries, keys and values, and shared experts with a gate."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import (
    Family,
    check_no_windows,
    dense_or_experts,
    expert_block_settings,
    mlp_rows,
    top_k_settings,
)
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.qwen3_moe import qwen_moe_settings
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor


def _model(hf: HfConfig) -> ModelConfig:
    check_no_windows(hf)
    width, shared = hf.whole("moe_intermediate_size"), hf.whole("shared_expert_intermediate_size")
    if width == 0 or shared % width:
        raise ConvertError(
            f"{hf.where}: shared_expert_intermediate_size={shared} is not supported: it must be a multiple of "
            f"moe_intermediate_size={width}"
        )
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        attention=AttentionConfig(bias=hf.flag("qkv_bias", True), out_bias=False),
        moe=MoEConfig(
            num_experts=hf.whole("num_experts", "num_local_experts"),
            **top_k_settings(hf, hf.flag("norm_topk_prob", False)),
            intermediate_size=width,
            num_shared_experts=shared // width,
            shared_gate=True,
            capacity_factor=None,
            **expert_block_settings(hf),
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    own = {
        "qkv_bias": model.attention.bias,
        "shared_expert_intermediate_size": model.moe.intermediate_size * model.moe.num_shared_experts,
    }
    return hf_settings(model) | qwen_moe_settings(model) | own


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    rows = dense_or_experts(model, kind)
    if kind == "moe":
        rows += mlp_rows("mlp.shared_expert", "moe.shared")
        rows.append(Tensor("mlp.shared_expert_gate.weight", "moe.shared.token_gate", "one model"))
    return rows


_DEFAULTS = {"num_key_value_heads": 16, "max_position_embeddings": 32_768}
FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", _model, _settings, _block, _DEFAULTS)
