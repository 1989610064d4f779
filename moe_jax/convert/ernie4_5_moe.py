"""ERNIE-4.5 (Baidu 2025): softmax scores with a bias in the choice of experts, shared experts.

Features that are rotated as a pair are neighbours on disk, and half a width apart in our arrays.
"""

import dataclasses
from typing import Any

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, expert_block_pattern, expert_rows, mlp_rows
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange, halves

_MOST_NORM_MIN = 1e-6  # far below the sum of the scores that a token's experts have


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("use_bias", False)
    if (norm_min := hf.number("moe_norm_min", 1e-12)) > _MOST_NORM_MIN:
        raise ConvertError(f"{hf.where}: moe_norm_min={norm_min} is not supported: it must be at most {_MOST_NORM_MIN}")
    top_k = hf.whole("moe_k", "num_experts_per_tok")
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        moe=MoEConfig(
            num_experts=hf.whole("moe_num_experts", "num_experts"),
            top_k=top_k,
            norm_top1_prob=top_k == 1,
            intermediate_size=hf.whole("moe_intermediate_size"),
            num_shared_experts=hf.whole("moe_num_shared_experts", default=0),
            bias_update_rate=0.0,  # there is a bias, and it is not updated
            capacity_factor=None,
            **_blocks(hf),
        ),
    )


def _blocks(hf: HfConfig) -> dict[str, Any]:
    """Return `first_k_dense_replace` and `moe_layer_freq` for the settings of ERNIE."""
    layers, start, every = (
        hf.num_layers(),
        hf.whole("moe_layer_start_index", default=0),
        max(hf.whole("moe_layer_interval", default=1), 1),
    )
    end = hf.number("moe_layer_end_index", -1)  # -1: the last block
    last = layers - 1 if end == -1 else end
    found = expert_block_pattern([start <= i <= last and (i + 1) % every == 0 for i in range(layers)], every)
    if found is None:
        raise ConvertError(
            f"{hf.where}: moe_layer_end_index={end:g} is not supported: dense blocks must be the lowest ones, and above"
            " them all but every n-th"
        )
    return {"first_k_dense_replace": found[0], "moe_layer_freq": found[1]}


def _settings(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "use_bias": False,
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_num_shared_experts": moe.num_shared_experts,
        "moe_layer_start_index": model.block_kinds.index("moe") if "moe" in model.block_kinds else model.num_layers,
        "moe_layer_end_index": model.num_layers - 1,
        "moe_layer_interval": moe.moe_layer_freq,
    }


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    pairs = TensorRange("head", model.head_width, halves(model.head_width))
    attention = [
        dataclasses.replace(row, part=pairs) if row.path in ("attention.query", "attention.key") else row
        for row in attention_rows(model)
    ]
    if kind == "dense":
        return [*attention, *mlp_rows("mlp", "mlp")]
    bias = Tensor("mlp.moe_statics.e_score_correction_bias", "moe.score_bias", "1 choices", float32=True)
    shared = mlp_rows("mlp.shared_experts", "moe.shared") if model.moe.num_shared_experts else []
    return [*attention, *expert_rows(model), bias, *shared]


_DEFAULTS = {
    "rope_theta": 500_000.0,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
FAMILY = Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _model, _settings, _block, _DEFAULTS)
