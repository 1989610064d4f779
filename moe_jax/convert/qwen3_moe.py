"""Qwen3 with experts (Qwen Team 2025)."""

from typing import Any

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.convert.family import Family, dense_or_experts, expert_block_settings, mlp_rows, top_k_settings
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.qwen3 import qwen3_settings
from moe_jax.convert.shared import hf_settings
from moe_jax.convert.tensors import Tensor


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


def gated_shared_experts(hf: HfConfig) -> dict[str, Any]:
    """Return the width of a model's experts and its shared experts, which are one MLP in the files, with a gate."""
    width, shared = hf.whole("moe_intermediate_size"), hf.whole("shared_expert_intermediate_size")
    if not shared or not width or shared % width:
        raise ConvertError(
            f"{hf.where}: shared_expert_intermediate_size={shared} is not supported: it must be a multiple of "
            f"moe_intermediate_size={width}, at least that"
        )
    return {"intermediate_size": width, "num_shared_experts": shared // width, "shared_gate": True}


def gated_shared_rows() -> list[Tensor]:
    """Return the rows of the shared experts, and of their gate."""
    gate = Tensor("mlp.shared_expert_gate.weight", "moe.shared.token_gate", "one model")
    return [*mlp_rows("mlp.shared_expert", "moe.shared"), gate]


def shared_width(model: ModelConfig) -> dict[str, int]:
    """Return the setting for config.json of the width of the shared experts."""
    return {"shared_expert_intermediate_size": model.moe.intermediate_size * model.moe.num_shared_experts}


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
