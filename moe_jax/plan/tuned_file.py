"""The settings that runs found fastest while they trained: a JSON file with one entry per tuned config.

[{"of": {"model": {…}, "mesh": {…}, …}, "settings": {"bucket_cap_mb": 2.1}, "step_s": 0.31}, …]
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.errors import ConfigError
from moe_jax.files.atomic import write_atomically
from moe_jax.files.untrusted import read_named_json


class Tuned(NamedTuple):
    """The fastest settings, and their step time."""

    settings: dict[str, float | str]
    step_s: float


def read_tuned(path: Path, of: Mapping[str, Any]) -> Tuned | None:
    """The entry for the same plain values `of`, if there is one. Raises ConfigError."""
    entries, same = _entries(path), _as_read(of)
    return next((Tuned(each["settings"], each["step_s"]) for each in entries if each["of"] == same), None)


def write_tuned(path: Path, of: Mapping[str, Any], tuned: Tuned) -> None:
    """Add an entry to the file, replacing one for the same values. Raises ConfigError or OSError."""
    others = [each for each in _entries(path) if each["of"] != _as_read(of)]
    write_atomically(path, json.dumps([*others, {"of": of} | tuned._asdict()], indent=1) + "\n")


def _as_read(of: Mapping[str, Any]) -> Any:
    """The same values as JSON returns them: tuples become lists."""
    return json.loads(json.dumps(of))


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    name = f"what was tuned before, {path},"
    entries = read_named_json(path, name, "remove it, or set tune.cache to another file", ConfigError)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ConfigError(
            f"{name} is no list of settings with step times: remove it, or set tune.cache to another file"
        )
    return entries


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"of", *Tuned._fields}
        and isinstance(entry["settings"], dict)
        and all(isinstance(value, str | int | float) for value in entry["settings"].values())
        and isinstance(entry["step_s"], float)
        and entry["step_s"] > 0
    )
