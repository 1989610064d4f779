"""MiniMax-M2 (2025): part of each head is rotated, norms over all queries and all keys, sigmoid scores with a bias."""

from typing import Any

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, mlp_rows, top_k_settings
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor

_FULL = 1  # in attn_type_list: attention of all pairs, as opposed to linear attention


def _model(hf: HfConfig) -> ModelConfig:
    for name, built in _ONLY.items():
        hf.only(name, built)
    for part in ("full_attention", "mlp"):  # factors on the residual stream, as in MiniMax-01
        hf.only(f"layernorm_{part}_beta", 1.0)
    if kinds := set(hf.listed("attn_type_list")) - {_FULL}:
        raise ConvertError(f"{hf.where}: attn_type_list has {min(kinds)}, which is not supported: all must be {_FULL}")
    if hf.has("rotary_dim"):  # the older name
        hf = hf.with_defaults({"partial_rotary_factor": hf.whole("rotary_dim") / max(hf.whole("head_dim"), 1)})
    return ModelConfig(
        **shared_settings(hf, partial_rotation=True),
        **grouped_heads(hf),
        qk_norm=True,
        qk_norm_over="projection",
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            **top_k_settings(hf, normalized=True),
            intermediate_size=hf.whole("intermediate_size"),
            gate="deepseek_v3",
            capacity_factor=None,
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return (
        hf_settings(model)
        | _ONLY
        | {
            "head_dim": model.head_width,
            "rotary_dim": model.rotary_width,
            "num_local_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "intermediate_size": model.moe.intermediate_size,
        }
    )


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [
        *attention_rows(model),
        Tensor("block_sparse_moe.gate.weight", "moe.router", "choices model"),
        Tensor("block_sparse_moe.e_score_correction_bias", "moe.score_bias", "choices", float32=True),
        *mlp_rows("block_sparse_moe.experts.{expert}", "moe.experts", ("w1", "w3", "w2")),
    ]


_ONLY = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
_DEFAULTS = {
    "rope_theta": 5e6,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
}
FAMILY = Family("minimax_m2", "MiniMaxM2ForCausalLM", _model, _settings, _block, _DEFAULTS)
