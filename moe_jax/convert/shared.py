"""Settings of config.json that all families share."""

from collections.abc import Sequence
from typing import Any

from moe_jax.config import ModelConfig
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.quantized import quantization_of
from moe_jax.convert.rope import hf_rope, rope_settings


def shared_settings(hf: HfConfig, partial_rotation: bool = False, longrope: bool = False) -> dict[str, Any]:
    """Return the arguments of ModelConfig that are the same for all families.

    `partial_rotation`: the family may rotate only part of a head's features. `longrope`: see `rope_settings`.
    """
    hf.only("hidden_act", "silu")
    quantization_of(hf)
    hf.only("mlp_bias", False)
    heads, hidden_size = hf.whole("num_attention_heads"), hf.whole("hidden_size")
    return {
        "vocab_size": hf.whole("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": hf.num_layers(),
        "num_attention_heads": heads,
        "rms_norm_eps": hf.number("rms_norm_eps"),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
        **rope_settings(hf, partial_rotation, longrope),
    }


def grouped_heads(hf: HfConfig) -> dict[str, Any]:
    """Return the arguments of ModelConfig for grouped-query attention."""
    heads, hidden_size = hf.whole("num_attention_heads"), hf.whole("hidden_size")
    kv_heads = hf.whole("num_key_value_heads", default=heads)
    width = hf.whole("head_dim", default=hidden_size // max(heads, 1))
    return {
        "num_key_value_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if width * heads == hidden_size else width,
    }


def hf_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings for config.json: the inverse of `shared_settings` and `grouped_heads`."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        **hf_rope(model),
    }


def interval_of(hf: HfConfig, name: str, found: Sequence[Any], usual: Any, other: Any) -> int | None:
    """Return n if of the blocks every n-th has the `other` value, or None if none has."""
    every = list(found).index(other) + 1 if other in found else None
    layers = hf.num_layers()
    if list(found) != [other if every and (i + 1) % every == 0 else usual for i in range(layers)]:
        raise ConvertError(
            f"{hf.where}: {name} is not supported: of num_hidden_layers={layers} every n-th must be {other!r}, the "
            f"others {usual!r}"
        )
    return every
