"""The dense blocks, router, shared and routed experts of DeepSeek-V3, which GLM-4.5 and dots.llm1 have, too."""

from typing import Any

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.convert.family import expert_rows, mlp_rows, top_k_settings
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.tensors import Tensor


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
