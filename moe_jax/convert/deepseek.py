"""The common parts of DeepSeek-V2, V3 and the models that borrow from them.

V2 and V3 share multi-head latent attention, shared experts, and dense blocks at the bottom. GLM-4.5 and dots.llm1 have
V3's dense blocks, router, shared and routed experts, too. Features that are rotated as a pair are neighbours on disk,
and half a width apart in our arrays.
"""

from typing import Any

from moe_jax.config import LatentConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import expert_rows, mlp_rows, norm_rows, top_k_settings
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange, halves

DENSE, SPARSE = "dense", "sparse"  # blocks without and with experts in `mlp_layer_types`


def moe_settings(hf: HfConfig, normalized: bool) -> dict[str, Any]:
    """Return the arguments of MoEConfig except those of the gate."""
    hf.only("moe_layer_freq", 1)
    return {
        **top_k_settings(hf, normalized),
        "num_experts": hf.whole("n_routed_experts", "num_experts", "num_local_experts"),
        "intermediate_size": hf.whole("moe_intermediate_size"),
        "num_shared_experts": hf.whole("n_shared_experts", default=0),
        "first_k_dense_replace": hf.whole("first_k_dense_replace", default=0),
        "routed_scaling_factor": hf.number("routed_scaling_factor", 1.0),
        "capacity_factor": None,
    }


def biased_router(hf: HfConfig) -> MoEConfig:
    """Return the experts of a model with sigmoid scores, and a bias in the choice of experts."""
    hf.only("topk_method", "noaux_tc")
    hf.only("scoring_func", "sigmoid")
    return MoEConfig(
        **moe_settings(hf, hf.flag("norm_topk_prob", False)),
        gate="deepseek_v3",
        n_group=hf.whole("n_group", default=1),
        topk_group=hf.whole("topk_group", default=1),
    )


def lowest_dense_blocks(hf: HfConfig, default: int) -> int:
    """Return the number of blocks without experts, the lowest ones, in `mlp_layer_types`; the default if it is missing.

    Raises ConvertError if they are not the lowest ones.
    """
    layers, types = hf.num_layers(), hf.listed("mlp_layer_types")
    if not types:
        return default
    dense = types.count(DENSE)
    if types != [DENSE] * dense + [SPARSE] * (layers - dense):
        raise ConvertError(
            f"{hf.where}: mlp_layer_types is not supported: the lowest must be {DENSE}, the others {SPARSE}"
        )
    return dense


def router_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings for config.json: the inverse of `biased_router`, and the width of dense blocks."""
    moe = model.moe
    return expert_settings(model) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": moe.divides_by_sum,
    }


def expert_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of dense blocks and experts for config.json."""
    moe = model.moe
    return {
        "intermediate_size": model.intermediate_size,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "moe_layer_freq": 1,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
    }


def router_rows(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the table rows of a block's MLP, or of its router with a bias and its experts."""
    bias = Tensor("mlp.gate.e_score_correction_bias", "moe.score_bias", "choices", float32=True)
    return [*mlp_or_experts(model, kind), *([bias] if kind == "moe" else [])]


def mlp_or_experts(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the table rows of a block's MLP, or of its router without a bias and its experts."""
    if kind == "dense":
        return mlp_rows("mlp", "mlp")
    shared = mlp_rows("mlp.shared_experts", "moe.shared") if model.moe.num_shared_experts else []
    return [*expert_rows(model), *shared]


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
        *norm_rows(model),
        *queries,
        Tensor(latents, "attention.kv_latent", "latent model", TensorRange("latent", rank + rotated, (range(rank),))),
        Tensor(latents, "attention.rope_key", "head model", TensorRange("head", rank + rotated, halves(rotated, rank))),
        Tensor("self_attn.kv_a_layernorm.weight", "attention.kv_latent_norm", "latent"),
        Tensor(both, "attention.key", "heads.head latent", key),
        Tensor(both, "attention.value", "heads.head latent", value),
        Tensor("self_attn.o_proj.weight", "attention.out", "model heads.head"),
    ]
