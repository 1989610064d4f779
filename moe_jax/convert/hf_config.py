"""config.json of a Hugging Face model, read with refusals in one line, and what all families have alike in it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.config import Model, RopeScaling
from moe_jax.errors import UserError

FILE = "config.json"
_DEEPEST = 64  # nested brackets of a file of settings


class ConvertError(UserError):
    """A Hugging Face folder that is incomplete, damaged, or holds what is not built here."""


class HfConfig:
    """The settings of one model. Each getter raises ConvertError for a value of another type, or for none."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self.where = values, where

    def has(self, name: str) -> bool:
        """Whether it is given, and not null."""
        return self._values.get(name) is not None

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of these names that is given; a whole number of at least 0."""
        value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(names[0], value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite one."""
        value = self._first((name,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._first((name,), default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def word(self, name: str, default: str | None = None) -> str:
        """Some text."""
        value = self._first((name,), default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def listed(self, name: str) -> list[Any]:
        """A list; none is an empty one."""
        value = self._first((name,), [])
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def section(self, name: str) -> "HfConfig | None":
        """Nested settings, if there are some."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return HfConfig(value, f"{self.where}: {name}") if value else None

    def only(self, name: str, *built: Any) -> None:
        """Raise ConvertError unless the value is one of these, or missing."""
        value = self._values.get(name)
        if value is not None and value not in built:
            words = " or ".join(json.dumps(each) for each in built) or "null"
            raise ConvertError(f"{self.where}: {name}={json.dumps(value)[:80]} is not built: it must be {words}")

    def _first(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if self.has(name):
                return self._values[name]
        if default is None:
            raise ConvertError(f"{self.where} has no {' or '.join(names)}: use the file that came with the model")
        return default

    def _wrong(self, name: str, value: Any, kind: str) -> ConvertError:
        return ConvertError(f"{self.where}: {name}={json.dumps(value)[:80]} must be {kind}")


def read_config(folder: Path) -> HfConfig:
    """Of a model's folder. Raises ConvertError."""
    return HfConfig(read_json(folder / FILE), str(folder / FILE))


def read_json(file: Path) -> dict[str, Any]:
    """An object. Raises ConvertError."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConvertError(f"{file} does not exist: name the folder of a Hugging Face model") from None
    except OSError as error:
        raise ConvertError(
            f"{file} cannot be read ({error.strerror}): name the folder of a Hugging Face model"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{file} is not JSON ({str(error)[:80]}): fetch it again") from None
    if not isinstance(found, dict):
        raise ConvertError(f"{file} holds no JSON object: fetch it again")
    return found


def shared_settings(hf: HfConfig) -> dict[str, Any]:
    """Arguments of a Model that all families give in the same way."""
    hf.only("hidden_act", "silu")
    hf.only("quantization_config")
    hf.only("mlp_bias", False)
    heads, d_model = hf.whole("num_attention_heads"), hf.whole("hidden_size")
    return {
        "vocab_size": hf.whole("vocab_size"),
        "d_model": d_model,
        "num_layers": hf.whole("num_hidden_layers"),
        "num_heads": heads,
        "norm_eps": hf.number("rms_norm_eps"),
        "tie_embeddings": hf.flag("tie_word_embeddings", False),
        "rope_theta": _rope(hf).number("rope_theta", hf.number("rope_theta", 10_000.0)),
        "rope_scaling": _scaling(hf),
    }


def grouped_heads(hf: HfConfig) -> dict[str, Any]:
    """Of grouped-query attention."""
    heads, d_model = hf.whole("num_attention_heads"), hf.whole("hidden_size")
    kv_heads = hf.whole("num_key_value_heads", default=heads)
    width = hf.whole("head_dim", default=d_model // max(heads, 1))
    return {
        "num_kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if width * heads == d_model else width,
    }


def hf_settings(model: Model) -> dict[str, Any]:
    """The inverse of `shared_settings` and `grouped_heads`, for a config.json."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        **_hf_scaling(model.rope_scaling, model.rope_theta),
    }


def _rope(hf: HfConfig) -> HfConfig:
    """Where files of one age or another have what concerns rotation."""
    return hf.section("rope_parameters") or hf.section("rope_scaling") or HfConfig({}, hf.where)


def _scaling(hf: HfConfig) -> RopeScaling:
    rope = _rope(hf)
    rope.only("partial_rotary_factor", 1.0)
    hf.only("partial_rotary_factor", 1.0)
    kind = rope.word("rope_type", rope.word("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind not in _KINDS:
        raise ConvertError(f"{rope.where}: rope_type={json.dumps(kind)} is not built: it must be {', '.join(_KINDS)}")
    return _KINDS[kind](rope, hf)


def _linear(rope: HfConfig, hf: HfConfig) -> RopeScaling:
    return RopeScaling(kind="linear", factor=rope.number("factor"))


def _llama3(rope: HfConfig, hf: HfConfig) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        original_length=rope.whole("original_max_position_embeddings"),
        slow_turns=rope.number("low_freq_factor"),
        fast_turns=rope.number("high_freq_factor"),
    )


def _yarn(rope: HfConfig, hf: HfConfig) -> RopeScaling:
    """Both numbers of DeepSeek's, `mscale` and `mscale_all_dim`, decide the factor on rotated features."""
    factor, all_dim = rope.number("factor"), rope.number("mscale_all_dim", 0.0)

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    own = rope.number("mscale", 0.0)
    default = mscale(own) / mscale(all_dim) if own and all_dim else mscale(1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=rope.whole(
            "original_max_position_embeddings", default=hf.whole("max_position_embeddings", default=4096)
        ),
        slow_turns=rope.number("beta_slow", 1.0),
        fast_turns=rope.number("beta_fast", 32.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", default),
        mscale_all_dim=all_dim,
    )


_KINDS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _hf_scaling(scaling: RopeScaling, theta: float) -> dict[str, Any]:
    """Under the names of files of both ages; and how long a sequence may be, which only scaling tells."""
    rope: dict[str, Any] = {"rope_type": "default" if scaling.kind == "none" else scaling.kind}
    if scaling.kind != "none":
        rope["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.slow_turns, "high_freq_factor": scaling.fast_turns}
    if scaling.kind == "yarn":
        rope |= {"beta_slow": scaling.slow_turns, "beta_fast": scaling.fast_turns, "truncate": scaling.truncate}
        rope["attention_factor"] = scaling.attention_factor
        if scaling.mscale_all_dim:
            rope |= {"mscale": scaling.mscale_all_dim, "mscale_all_dim": scaling.mscale_all_dim}
    long = scaling.original_length * scaling.factor if scaling.kind != "none" else 4096
    return {"rope_parameters": {"rope_theta": theta, **rope}, "max_position_embeddings": round(long)}
