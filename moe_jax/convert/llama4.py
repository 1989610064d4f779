"""Llama 4 (Meta 2025): attention in chunks, every n-th block without rotary embedding and with all tokens in sight, one
expert of each token, whose input is multiplied by its score, and a shared expert.

The published models also see images; only their language model is read and written. On disk, rotated pairs are
neighbours, and experts are stacked and transposed.
"""

import dataclasses
from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, expert_block_pattern, mlp_rows
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, interval_of, shared_settings
from moe_jax.convert.tensors import Tensor, TensorRange, halves

_CHUNKED, _FULL = "chunked_attention", "full_attention"  # in layer_types
_ROTATED = [f"attention.{name}{bias}" for name in ("query", "key") for bias in ("", "_bias")]
_ATTN_SCALE = 0.1  # of transformers, where a model has none


def _model(hf: HfConfig) -> ModelConfig:
    if (top_k := hf.whole("num_experts_per_tok")) != 1:
        raise ConvertError(f"{hf.where}: num_experts_per_tok={top_k} is not supported: it must be 1")
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size_mlp"),
        qk_l2_norm=hf.flag("use_qk_norm", True),
        attention=_attention(hf),
        moe=MoEConfig(
            num_experts=hf.whole("num_local_experts", "num_experts"),
            top_k=1,
            intermediate_size=hf.whole("intermediate_size"),
            num_shared_experts=1,
            gate="sigmoid",
            apply_probs_on_input=True,
            capacity_factor=None,
            **_expert_blocks(hf),
        ),
    )


def _attention(hf: HfConfig) -> AttentionConfig:
    layers, every = hf.num_layers(), hf.whole("no_rope_layer_interval", default=4)
    rotated = hf.listed("no_rope_layers") or [int(every == 0 or (i + 1) % every != 0) for i in range(layers)]
    nope_every = interval_of(hf, "no_rope_layers", rotated, 1, 0)
    chunk = hf.whole("attention_chunk_size") if hf.has("attention_chunk_size") else None
    kinds = [_CHUNKED if chunk is not None and each else _FULL for each in rotated]
    kinds = hf.listed("layer_types") or kinds
    full_every = interval_of(hf, "layer_types", kinds, _CHUNKED, _FULL)
    chunks: dict[str, Any] = {} if full_every == 1 else {"chunk_size": chunk, "full_every": full_every}
    if chunks and chunk is None:
        raise ConvertError(f"{hf.where}: layer_types has {_CHUNKED!r}, and attention_chunk_size is null: set it")
    tuned = nope_every is not None and hf.truth("attn_temperature_tuning", True)
    tuning: dict[str, Any] = {}
    if tuned:
        tuning = {"attn_scale": hf.number("attn_scale"), "floor_scale": hf.whole("floor_scale")}
    return AttentionConfig(bias=hf.flag("attention_bias", False), nope_every=nope_every, **chunks, **tuning)


def _expert_blocks(hf: HfConfig) -> dict[str, Any]:
    layers, step = hf.num_layers(), max(hf.whole("interleave_moe_layer_step", default=1), 1)
    own = hf.listed_or_none("moe_layers")
    own = list(range(step - 1, layers, step)) if own is None else own
    found = expert_block_pattern([block in own for block in range(layers)], step)
    if found is None:
        raise ConvertError(
            f"{hf.where}: moe_layers={own} is not supported: above the lowest blocks, every n-th must have experts"
        )
    return {"first_k_dense_replace": found[0], "moe_layer_freq": found[1]}


def _settings(model: ModelConfig) -> dict[str, Any]:
    attention, moe = model.attention, model.moe
    decoder = range(model.num_layers)
    return hf_settings(model) | {
        "head_dim": model.head_width,
        "attention_bias": attention.bias,
        "use_qk_norm": model.qk_l2_norm,
        "no_rope_layers": [int(model.views[block].rope) for block in decoder],
        "layer_types": [_FULL if model.views[block].chunk is None else _CHUNKED for block in decoder],
        "attention_chunk_size": attention.chunk_size,
        "attn_temperature_tuning": attention.attn_scale > 0,
        "attn_scale": attention.attn_scale or _ATTN_SCALE,
        "floor_scale": attention.floor_scale,
        "intermediate_size_mlp": model.intermediate_size,
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "interleave_moe_layer_step": moe.moe_layer_freq,
        "moe_layers": [block for block in decoder if model.block_kinds[block] == "moe"],
    }


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    pairs, hidden = TensorRange("head", model.head_width, halves(model.head_width)), model.moe.intermediate_size
    attention = [dataclasses.replace(row, part=pairs) if row.path in _ROTATED else row for row in attention_rows(model)]
    if kind == "dense":
        return [*attention, *mlp_rows("feed_forward", "mlp")]
    gate, up = (TensorRange("hidden", 2 * hidden, (range(first, first + hidden),)) for first in (0, hidden))
    both = "feed_forward.experts.gate_up_proj"
    return [
        *attention,
        Tensor("feed_forward.router.weight", "moe.router", "choices model"),
        Tensor(both, "moe.experts.gate", "experts model hidden", gate),
        Tensor(both, "moe.experts.up", "experts model hidden", up),
        Tensor("feed_forward.experts.down_proj", "moe.experts.down", "experts hidden model"),
        *mlp_rows("feed_forward.shared_expert", "moe.shared"),
    ]


_DEFAULTS = {
    "rope_theta": 500_000.0,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": _ATTN_SCALE,
    "intermediate_size_mlp": 16_384,
    "num_experts_per_tok": 1,
}
FAMILY = Family("llama4_text", "Llama4ForCausalLM", _model, _settings, _block, _DEFAULTS)
