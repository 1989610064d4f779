"""dots.llm1 (rednote 2025): the attention of Qwen3, and the router and shared experts of DeepSeek-V3."""

from typing import Any

from moe_jax.config import AttentionConfig, ModelConfig
from moe_jax.convert.deepseek import biased_router, router_rows, router_settings
from moe_jax.convert.family import Family, attention_rows
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.shared import grouped_heads, hf_settings, shared_settings
from moe_jax.convert.tensors import Tensor

_FULL = "full_attention"


def _model(hf: HfConfig) -> ModelConfig:
    _check_no_windows(hf)
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        qk_norm=True,
        attention=AttentionConfig(bias=hf.flag("attention_bias", False)),
        moe=biased_router(_with_named_scores(hf)),
    )


def _with_named_scores(hf: HfConfig) -> HfConfig:
    """Return the settings with the usual name of the scores: the published file names the choice of experts there."""
    published = hf.has("scoring_func") and hf.word("scoring_func") == "noaux_tc"
    return hf.with_values({"scoring_func": "sigmoid"}) if published else hf


def _check_no_windows(hf: HfConfig) -> None:
    """Raise ConvertError if blocks have windows: those of `layer_types`, or those from `max_window_layers` on."""
    layers, types = hf.num_layers(), hf.listed("layer_types")
    if types and types != [_FULL] * layers:
        raise ConvertError(f"{hf.where}: layer_types is not supported: all must be {_FULL}")
    full = hf.whole("max_window_layers", default=62)
    if not types and hf.has("sliding_window") and full < layers:
        raise ConvertError(
            f"{hf.where}: sliding_window={hf.whole('sliding_window')} is not supported: it must be null, or "
            f"max_window_layers={full} at least num_hidden_layers={layers}"
        )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return (
        hf_settings(model)
        | router_settings(model)
        | {"head_dim": model.head_width, "attention_bias": model.attention.bias, "sliding_window": None}
    )


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [*attention_rows(model), *router_rows(model, kind)]


_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096}
FAMILY = Family("dots1", "Dots1ForCausalLM", _model, _settings, _block, _DEFAULTS)
