"""Qwen3-Next (Qwen Team 2025): gated delta nets, between them attention with an output gate, and a gated shared expert.

One tensor of a delta net has the queries, keys, values and gates of all key heads, head by head; another one the rates
and steps of all value heads, grouped by key head.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_jax.config import AttentionConfig, DeltaNetConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import (
    Family,
    attention_rows,
    expert_block_settings,
    expert_rows,
    mlp_rows,
    norm_rows,
    top_k_settings,
)
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.qwen3_moe import gated_shared_experts, gated_shared_rows, qwen_moe_settings, shared_width
from moe_jax.convert.shared import grouped_heads, hf_settings, interval_of, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange

_DELTA, _FULL = "linear_attention", "full_attention"  # in layer_types
_QUERY = "self_attn.q_proj.weight"


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("attention_bias", False)
    return ModelConfig(
        **shared_settings(hf, partial_rotation=True),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        qk_norm=True,
        rms_norm_zero_centered=True,
        attention=AttentionConfig(output_gate=True),
        delta_net=_delta_net(hf),
        moe=MoEConfig(
            num_experts=hf.whole("num_experts", "num_local_experts"),
            **top_k_settings(hf, hf.flag("norm_topk_prob", True)),
            **gated_shared_experts(hf),
            capacity_factor=None,
            **expert_block_settings(hf),
        ),
    )


def _delta_net(hf: HfConfig) -> DeltaNetConfig:
    """Return the settings of the delta nets, if a block has one."""
    layers, every = hf.num_layers(), hf.whole("full_attention_interval", default=4)
    if every == 0:
        raise ConvertError(f"{hf.where}: full_attention_interval=0 is not supported: it must be at least 1")
    types = hf.listed("layer_types") or _types(layers, every)
    if types == _types(layers, 1):
        return DeltaNetConfig()
    interval = interval_of(hf, "layer_types", types, _DELTA, _FULL)
    heads, key_heads = hf.whole("linear_num_value_heads"), hf.whole("linear_num_key_heads")
    return DeltaNetConfig(
        num_value_heads=heads,
        num_key_heads=None if key_heads == heads else key_heads,
        key_head_dim=hf.whole("linear_key_head_dim"),
        value_head_dim=hf.whole("linear_value_head_dim"),
        conv_kernel_dim=hf.whole("linear_conv_kernel_dim"),
        full_attention_interval=interval,
    )


def _types(layers: int, interval: int | None) -> list[str]:
    return [_FULL if interval and (block + 1) % interval == 0 else _DELTA for block in range(layers)]


def _settings(model: ModelConfig) -> dict[str, Any]:
    delta = model.delta_net
    own: dict[str, Any] = {
        "attention_bias": False,
        "layer_types": [_DELTA if view.is_recurrent else _FULL for view in model.views],
        "partial_rotary_factor": model.partial_rotary_factor,
    }
    if model.has_delta_nets:
        own |= {
            "linear_num_value_heads": delta.num_value_heads,
            "linear_num_key_heads": delta.key_heads,
            "linear_key_head_dim": delta.key_head_dim,
            "linear_value_head_dim": delta.value_head_dim,
            "linear_conv_kernel_dim": delta.conv_kernel_dim,
            "full_attention_interval": delta.full_attention_interval or model.num_layers + 1,
        }
    return hf_settings(model) | qwen_moe_settings(model) | shared_width(model) | own


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block with attention: its query matrix has each head's query, and then its gate."""
    width = model.head_width
    query, gate = (TensorRange("head", 2 * width, (range(first, first + width),)) for first in (0, width))
    attention = [dataclasses.replace(row, part=query) if row.name == _QUERY else row for row in attention_rows(model)]
    return [*attention, Tensor(_QUERY, "attention.gate", "heads.head model", gate), *mlp_or_experts(model, kind)]


def _delta_block(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block with a delta net."""
    delta, name = model.delta_net, "linear_attn"
    keys, values = delta.key_head_dim, delta.group * delta.value_head_dim
    return [
        *norm_rows(model),
        *_parts(f"{name}.in_proj_qkvz.weight", ("query", "key", "value", "gate"), (keys, keys, values, values)),
        *_parts(f"{name}.in_proj_ba.weight", ("rate", "step"), (delta.group, delta.group)),
        *delta_rows(),
        *mlp_or_experts(model, kind),
    ]


def delta_rows() -> list[Tensor]:
    """Return the rows of a delta net after its projections: convolution, decay, norm and output."""
    name = "linear_attn"
    return [
        Tensor(f"{name}.conv1d.weight", "attention.conv", "channels 1 taps"),
        Tensor(f"{name}.A_log", "attention.decay_log", "heads"),
        Tensor(f"{name}.dt_bias", "attention.step_bias", "heads"),
        Tensor(f"{name}.norm.weight", "attention.value_norm", "head"),
        Tensor(f"{name}.out_proj.weight", "attention.out", "model heads.head"),
    ]


def _parts(name: str, paths: Sequence[str], widths: Sequence[int]) -> list[Tensor]:
    """Return the rows of our arrays that are one tensor, which has one after the other for each key head."""
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    return [
        Tensor(
            name,
            f"attention.{path}",
            "kv_heads.head model",
            TensorRange("head", ends[-1], (range(end - width, end),)),
        )
        for path, width, end in zip(paths, widths, ends, strict=True)
    ]


def mlp_or_experts(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block's MLP, or of its experts and the shared one."""
    if kind == "dense":
        return mlp_rows("mlp", "mlp")
    return [*expert_rows(model), *gated_shared_rows()]


_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32_768,
}
FAMILY = Family(
    "qwen3_next", "Qwen3NextForCausalLM", _model, _settings, _block, _DEFAULTS, recurrent_block=_delta_block
)
