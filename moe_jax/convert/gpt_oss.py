"""gpt-oss (OpenAI 2025): windows in every other block, sinks, biases everywhere, clipped SwiGLU.

On disk experts are stacked and transposed, and the columns of an expert's gate and up matrices alternate.
"""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, interval_of, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange

GATE = "gpt_oss"
_WINDOW, _FULL = "sliding_attention", "full_attention"


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("swiglu_limit", 7.0)
    hf.only("swiglu_alpha", 1.702)
    hf.only("attention_bias", True)
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        activation="clipped_swiglu",
        attention=AttentionConfig(bias=True, sinks=True, **_windows(hf)),
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            top_k=hf.whole("num_experts_per_tok", "experts_per_token"),
            intermediate_size=hf.whole("intermediate_size"),
            bias=True,
            gate=GATE,
            capacity_factor=None,
        ),
    )


def _windows(hf: HfConfig) -> dict[str, Any]:
    layers = hf.num_layers()
    types = hf.listed("layer_types") or [_FULL if i % 2 else _WINDOW for i in range(layers)]
    if types == [_FULL] * layers:
        return {"sliding_window": None}
    every = interval_of(hf, "layer_types", types, _WINDOW, _FULL)
    return {"sliding_window": hf.whole("sliding_window"), "full_every": every}


def _settings(model: ModelConfig) -> dict[str, Any]:
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "attention_bias": True,
        "sliding_window": model.attention.sliding_window,
        "layer_types": [_WINDOW if view.window else _FULL for view in model.views],
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.intermediate_size,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    both = 2 * model.moe.intermediate_size
    gate, up = (TensorRange("hidden", both, (range(first, both, 2),)) for first in range(2))
    return [
        *attention_rows(model),
        Tensor("self_attn.sinks", "attention.sink", "heads"),
        Tensor("mlp.router.weight", "moe.router", "choices model"),
        Tensor("mlp.router.bias", "moe.router_bias", "choices"),
        Tensor("mlp.experts.gate_up_proj", "moe.experts.clipped_gate", "experts model hidden", gate),
        Tensor("mlp.experts.gate_up_proj", "moe.experts.up", "experts model hidden", up),
        Tensor("mlp.experts.gate_up_proj_bias", "moe.experts.clipped_gate_bias", "experts hidden", gate),
        Tensor("mlp.experts.gate_up_proj_bias", "moe.experts.up_bias", "experts hidden", up),
        Tensor("mlp.experts.down_proj", "moe.experts.down", "experts hidden model"),
        Tensor("mlp.experts.down_proj_bias", "moe.experts.down_bias", "experts model"),
    ]


_DEFAULTS = {
    "rope_theta": 150_000.0,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "default_rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
FAMILY = Family("gpt_oss", "GptOssForCausalLM", _model, _settings, _block, _DEFAULTS)
