"""Rules for the data: one path, or a mixture of sources with weights."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moe_jax.config.ranges import LARGE, Range, check_number
from moe_jax.config.sections import DataConfig, DataSource
from moe_jax.config.validate.ranges import check_changes
from moe_jax.errors import ConfigError

_WEIGHTS = Range(0, LARGE)
_NOT_IN_LABEL = re.compile(r"[^\w.~+-]+")  # what the last part of a metric's name must not have
_LABEL_HAS = "letters, digits and . _ - + ~ only"
_BOTH = (
    "data.path={} and data.sources are both set: use data.path=null to train on the sources, or data.sources=[] to "
    "train on the path"
)
_SOURCE = "name a .txt, .jsonl, .parquet or .array_record file, or a prepared folder"


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for empty names, both a path and sources, or weights that choose no source."""
    if data.path == "":
        raise ConfigError(f"data.path is empty: {_SOURCE}")
    if not data.tokenizer:
        raise ConfigError("data.tokenizer is empty: use bytes, or name a folder with a tokenizer.json")
    if not data.text_key:
        raise ConfigError("data.text_key is empty: name the field or column with the text")
    if not data.sources:
        if data.path is None:
            raise ConfigError(f"data.path=null and data.sources=[] name no text: {_SOURCE} by data.path")
        return
    if data.path not in (None, DataConfig.path):
        raise ConfigError(_BOTH.format(data.path))
    numbers: dict[str, int] = {}
    for number, source in enumerate(data.sources):
        _check_source(f"data.sources[{number}]", source)
        if (earlier := numbers.setdefault(source.label, number)) != number:
            raise ConfigError(
                f"data.sources[{earlier}] and data.sources[{number}] both have the name {source.label} in metrics: "
                f"set data.sources[{number}].name"
            )
    for step in data.weight_steps:
        if not any(source.weight_at(step) for source in data.sources):
            raise ConfigError(f"data.sources has no weight above 0 in step {step}: set that of a source")


def check_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override asks for the default path in a config with sources.

    `values` are those of the config after the overrides. `check_data` refuses all other paths, and takes this one for
    the default, which the files of all runs on sources have.
    """
    data = values.get("data")
    if not isinstance(data, Mapping) or not data.get("sources") or data.get("path") != DataConfig.path:
        return
    if any(text.startswith("data.path=") for text in overrides):
        raise ConfigError(_BOTH.format(data["path"]))


def _check_source(name: str, source: DataSource) -> None:
    if not source.path:
        raise ConfigError(f"{name}.path is empty: {_SOURCE}")
    if source.name == "":
        raise ConfigError(f"{name}.name is empty: give it a name for metrics, or null")
    if _NOT_IN_LABEL.search(source.label) or not source.label:
        allowed = _NOT_IN_LABEL.sub("_", source.label) or "text"
        if source.name is None:
            raise ConfigError(
                f"{name}.path={source.path} gives metrics the name {source.label!r}, which must have {_LABEL_HAS}: set "
                f"{name}.name={allowed}"
            )
        raise ConfigError(f"{name}.name={source.name} must have {_LABEL_HAS}, as a name in metrics: use {allowed}")
    check_number(f"{name}.weight", source.weight, _WEIGHTS)
    check_changes(f"{name}.weight_schedule", source.weight_schedule, _WEIGHTS, "a weight", [[1000, 0.5], [5000, 2]])
