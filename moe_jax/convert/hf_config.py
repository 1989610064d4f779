"""The settings in config.json of a Hugging Face model, with one-line errors."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.config.validate.ranges import RANGES
from moe_jax.errors import UserError
from moe_jax.files import untrusted as foreign_files

FILE = "config.json"
_SEE_IMAGES = ("qwen3_5_moe", "llama4")  # model types whose language model has its settings in a section
_TEXT, _TIED = "text_config", "tie_word_embeddings"


class ConvertError(UserError):
    """A Hugging Face folder that is incomplete, damaged, or of an unsupported model."""


class HfConfig:
    """The settings of one model. Each getter raises ConvertError for a value of another type or a missing one."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self.where = values, where

    def with_defaults(self, defaults: Mapping[str, Any]) -> "HfConfig":
        """Return the settings with defaults for those that are missing. A setting that is null stays null."""
        return HfConfig({**defaults, **self._values}, self.where)

    def with_values(self, values: Mapping[str, Any]) -> "HfConfig":
        """Return the settings with other values for some."""
        return HfConfig({**self._values, **values}, self.where)

    def merged(self, section: "HfConfig") -> "HfConfig":
        """Return the settings with those of a section in place of those of the same names."""
        return HfConfig({**self._values, **section._values}, section.where)

    def has(self, name: str) -> bool:
        """Whether the file has this setting, and it is not null."""
        return self._values.get(name) is not None

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return the first of these settings that the file has: a whole number of at least 0."""
        value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            raise self._wrong(names[0], value, f"0..{2**31 - 1}" if is_whole else "a whole number")
        return value

    def num_layers(self) -> int:
        """Return the number of blocks, at most as many as a config allows, since loops visit each of them."""
        name, most = "num_hidden_layers", round(RANGES["model.num_layers"].most)
        if (layers := self.whole(name)) > most:
            raise self._wrong(name, layers, f"at most {most}")
        return layers

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._first((name,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._first((name,), default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def truth(self, name: str, default: bool) -> bool:
        """Return a truth value that older files have as a whole number."""
        value = self._first((name,), default)
        if not isinstance(value, int):
            raise self._wrong(name, value, "true or false")
        return bool(value)

    def word(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._first((name,), default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def listed(self, name: str) -> list[Any]:
        """Return a list, which is empty if the setting is missing."""
        value = self._first((name,), [])
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        value = self._first((name,), None)
        if not isinstance(value, list) or not all(type(each) in (int, float) and math.isfinite(each) for each in value):
            raise self._wrong(name, value, "a list of numbers")
        return tuple(map(float, value))

    def listed_or_none(self, name: str) -> list[Any] | None:
        """Return a list, or None if the setting is missing or no list."""
        value = self._values.get(name)
        return value if isinstance(value, list) else None

    def token_ids(self, *names: str) -> dict[str, int | list[int] | None]:
        """Return those of these settings that the file has: a whole number, a list of them, or null."""
        found = {name: self._values[name] for name in names if name in self._values}
        for name, value in found.items():
            if (
                any(type(each) is not int for each in (value if isinstance(value, list) else [value]))
                and value is not None
            ):
                raise self._wrong(name, value, "a whole number, a list of them or null")
        return found

    def section(self, name: str) -> "HfConfig | None":
        """Return nested settings, or None if there are none."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return HfConfig(value, f"{self.where}: {name}") if value else None

    def sections(self) -> "list[HfConfig]":
        """Return all nested settings."""
        nested = {name: value for name, value in self._values.items() if isinstance(value, Mapping)}
        return [HfConfig(value, f"{self.where}: {name}") for name, value in nested.items()]

    def only(self, name: str, *built: Any) -> None:
        """Raise ConvertError unless the value is one of these supported ones, null or missing."""
        value = self._values.get(name)
        if value is not None and value not in built:
            words = " or ".join(json.dumps(each) for each in built) or "null"
            raise ConvertError(f"{self.where}: {name}={json.dumps(value)[:80]} is not supported: it must be {words}")

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
    """Return the settings of the language model in a folder. Raises ConvertError."""
    return config_in(folder / FILE)


def config_in(file: Path) -> HfConfig:
    """Return the settings of the language model in a config.json. Raises ConvertError.

    A model that also sees images has them in a section; outside it are those of the whole model, such as ids of tokens.
    """
    whole = HfConfig(read_json(file), str(file))
    if not whole.has("model_type") or (model_type := whole.word("model_type")) not in _SEE_IMAGES:
        return whole
    section = whole.section(_TEXT)
    if section is None:
        raise ConvertError(f"{file}: model_type={model_type!r} has no {_TEXT}: use the file that came with the model")
    section.only("model_type", f"{model_type}_text")
    if section.has(_TIED):
        section.only(_TIED, whole.flag(_TIED, False))
    return whole.merged(section).with_values({"model_type": f"{model_type}_text"})


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConvertError."""
    try:
        found = foreign_files.read_json(file)
    except FileNotFoundError:
        raise ConvertError(f"{file} does not exist: name the folder of a Hugging Face model") from None
    except OSError as error:
        raise ConvertError(
            f"{file} cannot be read ({error.strerror}): name the folder of a Hugging Face model"
        ) from None
    except ValueError as error:
        raise ConvertError(f"{file} is not JSON ({str(error)[:80]}): fetch it again") from None
    if not isinstance(found, dict):
        raise ConvertError(f"{file} holds no JSON object: fetch it again")
    return found
