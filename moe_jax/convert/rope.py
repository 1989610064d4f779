"""Conversion of the settings of rotary embedding and of the scaling of its frequencies."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from moe_jax.config import ModelConfig, RopeScalingConfig
from moe_jax.convert.hf_config import ConvertError, HfConfig

_NEW, _OLD, _DEFAULT = "rope_parameters", "rope_scaling", "default_rope_parameters"
_PARTIAL = "partial_rotary_factor"


def rope_settings(hf: HfConfig, partial: bool = False, longrope: bool = False) -> dict[str, Any]:
    """Return the arguments of ModelConfig for rotary embedding. Raises ConvertError for unsupported settings.

    If a file has both `rope_scaling` and `rope_parameters`, the former is used, as in transformers 5. It is an error if
    both scale positions and disagree, or if only the latter has a base, which transformers would ignore. `partial`: the
    family may rotate only part of a head's features. `longrope`: its positions may be scaled as those of Phi-3.5-MoE.
    """
    kinds = {**_KINDS, "longrope": _longrope} if longrope else _KINDS
    old, new = hf.section(_OLD), hf.section(_NEW)
    found = _settings(old or new or hf.section(_DEFAULT) or HfConfig({}, hf.where), hf, partial, kinds)
    if old and new:
        for name, value in _settings(new, hf, partial, kinds).items():
            if value != found[name] and value != RopeScalingConfig():
                raise ConvertError(
                    f"{hf.where}: {_OLD} makes model.{name}={_text(found[name])}, and {_NEW} makes it {_text(value)}: "
                    f"write the same rope_theta and scaling into both, or remove {_OLD}"
                )
    return found


def _settings(rope: HfConfig, hf: HfConfig, partial: bool, kinds: "_Kinds") -> dict[str, Any]:
    theta = rope.number("rope_theta", hf.number("rope_theta", 10_000.0))
    found = {"rope_theta": theta, "rope_scaling": _scaling(rope, hf, kinds)}
    if partial:
        return found | {_PARTIAL: rope.number(_PARTIAL, hf.number(_PARTIAL, 1.0))}
    for section in (rope, hf):
        section.only(_PARTIAL, 1.0)
    return found


def _text(value: float | RopeScalingConfig) -> str:
    """Return a base or a scaling for a message; of a scaling, only the settings that are not the default."""
    if not isinstance(value, RopeScalingConfig):
        return f"{value:g}"
    plain = RopeScalingConfig()
    own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed = {name: each for name, each in own.items() if each != getattr(plain, name)}
    changed = changed or {"rope_type": value.rope_type}
    return ", ".join(f"{name}={f'{each:g}' if isinstance(each, float) else each}" for name, each in changed.items())


def _scaling(rope: HfConfig, hf: HfConfig, kinds: "_Kinds") -> RopeScalingConfig:
    for each in rope.sections():
        raise ConvertError(f"{each.where} is not supported: all blocks must have one rotary embedding")
    kind = rope.word("rope_type", rope.word("type", "default"))
    if kind == "default":
        return RopeScalingConfig()
    if kind not in kinds:
        raise ConvertError(
            f"{rope.where}: rope_type={json.dumps(kind)} is not supported: it must be {', '.join(kinds)}"
        )
    scaling = kinds[kind](rope, hf)
    if not hf.has("kv_lora_rank"):
        return scaling
    # latent attention (DeepSeek) scales its logits with every kind of scaling
    return dataclasses.replace(scaling, mscale_all_dim=rope.number("mscale_all_dim", 0.0))


def _linear(rope: HfConfig, hf: HfConfig) -> RopeScalingConfig:
    return RopeScalingConfig(rope_type="linear", factor=rope.number("factor"))


def _llama3(rope: HfConfig, hf: HfConfig) -> RopeScalingConfig:
    return RopeScalingConfig(
        rope_type="llama3",
        factor=rope.number("factor"),
        original_max_position_embeddings=_original_length(rope, hf),
        slow_turns=rope.number("low_freq_factor"),
        fast_turns=rope.number("high_freq_factor"),
    )


def _yarn(rope: HfConfig, hf: HfConfig) -> RopeScalingConfig:
    """Return YaRN scaling. `mscale` and `mscale_all_dim` together determine the factor on rotated features."""
    factor, all_dim = rope.number("factor"), rope.number("mscale_all_dim", 0.0)

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    own = rope.number("mscale", 0.0)
    default = mscale(own) / mscale(all_dim) if own and all_dim else mscale(1.0)
    return RopeScalingConfig(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=_original_length(rope, hf),
        slow_turns=rope.number("beta_slow", 1.0),
        fast_turns=rope.number("beta_fast", 32.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", default),
    )


def _longrope(rope: HfConfig, hf: HfConfig) -> RopeScalingConfig:
    """Return LongRoPE scaling. Its factor on rotated features is the same for all lengths."""
    factor, long = rope.number("short_mscale"), rope.number("long_mscale")
    if factor != long:
        raise ConvertError(
            f"{rope.where}: short_mscale={factor:g} and long_mscale={long:g} are not supported: they must be the same"
        )
    return RopeScalingConfig(
        rope_type="longrope",
        original_max_position_embeddings=_original_length(rope, hf),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        attention_factor=factor,
    )


def _original_length(rope: HfConfig, hf: HfConfig) -> int:
    """Return the length of pre-training: as in transformers, a top-level setting precedes one of the section."""
    name = "original_max_position_embeddings"
    return hf.whole(name) if hf.has(name) else rope.whole(name, default=hf.whole("max_position_embeddings"))


_Kinds = Mapping[str, Callable[[HfConfig, HfConfig], RopeScalingConfig]]
_KINDS: _Kinds = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def hf_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of rotary embedding for config.json."""
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default" if scaling.rope_type == "none" else scaling.rope_type}
    if scaling.rope_type not in ("none", "longrope"):
        rope["factor"] = scaling.factor
    if scaling.rope_type == "longrope":
        rope |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), scaling.attention_factor)
    if scaling.rope_type in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        rope |= {"low_freq_factor": scaling.slow_turns, "high_freq_factor": scaling.fast_turns}
    if scaling.rope_type == "yarn":
        rope |= {"beta_slow": scaling.slow_turns, "beta_fast": scaling.fast_turns, "truncate": scaling.truncate}
        rope["attention_factor"] = scaling.attention_factor
    if scaling.mscale_all_dim:
        rope["mscale_all_dim"] = scaling.mscale_all_dim
        if scaling.rope_type == "yarn":
            rope["mscale"] = scaling.mscale_all_dim
    if model.partial_rotary_factor != 1:
        rope[_PARTIAL] = model.partial_rotary_factor
    older = {"rope_scaling": rope} if scaling.rope_type != "none" else {}  # the setting before transformers 5
    return {
        "rope_theta": model.rope_theta,
        **older,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
    }
