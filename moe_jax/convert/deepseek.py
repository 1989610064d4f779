"""The common part of DeepSeek-V2 and V3: multi-head latent attention, shared experts, dense blocks at the bottom.

Features that are rotated as a pair are neighbours on disk, and half a width apart in our arrays.
"""

from typing import Any

from moe_jax.config import LatentConfig, ModelConfig
from moe_jax.convert.deepseek_router import expert_settings, mlp_or_experts
from moe_jax.convert.family import norm_rows
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange, halves

_LATENT_EPS = 1e-6  # epsilon of the latents' norms, independent of rms_norm_eps


def model_settings(hf: HfConfig) -> dict[str, Any]:
    """Return the arguments of ModelConfig except `moe`."""
    hf.only("attention_bias", False)
    shared = shared_settings(hf)
    return {
        **shared,
        "intermediate_size": hf.whole("intermediate_size"),
        "latent": LatentConfig(
            kv_lora_rank=hf.whole("kv_lora_rank"),
            q_lora_rank=hf.whole("q_lora_rank") if hf.has("q_lora_rank") else None,
            qk_nope_head_dim=hf.whole("qk_nope_head_dim"),
            qk_rope_head_dim=hf.whole("qk_rope_head_dim"),
            v_head_dim=hf.whole("v_head_dim"),
            rms_norm_eps=None if shared["rms_norm_eps"] == _LATENT_EPS else _LATENT_EPS,
        ),
    }


def settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model for config.json."""
    latent = model.latent
    return (
        hf_settings(model)
        | expert_settings(model)
        | {
            "attention_bias": False,
            "head_dim": latent.qk_rope_head_dim,
            "kv_lora_rank": latent.kv_lora_rank,
            "q_lora_rank": latent.q_lora_rank,
            "qk_nope_head_dim": latent.qk_nope_head_dim,
            "qk_rope_head_dim": latent.qk_rope_head_dim,
            "v_head_dim": latent.v_head_dim,
        }
    )


def block(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the table rows of a block, without the bias of a router."""
    return [*attention_rows(model), *mlp_or_experts(model, kind)]


def attention_rows(model: ModelConfig) -> list[Tensor]:
    """Return the rows of latent attention and of the block's norms."""
    latent = model.latent
    plain, rotated, width = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    rank = latent.kv_lora_rank
    assert rank is not None, "a model with latents"
    query = TensorRange("head", plain + rotated, (range(plain), *halves(rotated, plain)))
    if latent.q_lora_rank is None:
        queries = [Tensor("self_attn.q_proj.weight", "attention.query", "heads.head model", query)]
    else:
        queries = [
            Tensor("self_attn.q_a_proj.weight", "attention.query_latent", "latent model"),
            Tensor("self_attn.q_a_layernorm.weight", "attention.query_latent_norm", "latent"),
            Tensor("self_attn.q_b_proj.weight", "attention.query", "heads.head latent", query),
        ]
    latents, both = "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight"
    key = TensorRange("head", plain + width, (range(plain),))
    value = TensorRange("head", plain + width, (range(plain, plain + width),))
    return [
        *norm_rows(),
        *queries,
        Tensor(latents, "attention.kv_latent", "latent model", TensorRange("latent", rank + rotated, (range(rank),))),
        Tensor(latents, "attention.rope_key", "head model", TensorRange("head", rank + rotated, halves(rotated, rank))),
        Tensor("self_attn.kv_a_layernorm.weight", "attention.kv_latent_norm", "latent"),
        Tensor(both, "attention.key", "heads.head latent", key),
        Tensor(both, "attention.value", "heads.head latent", value),
        Tensor("self_attn.o_proj.weight", "attention.out", "model heads.head"),
    ]
