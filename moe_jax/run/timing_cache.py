"""Caches of measured times: one JSON file of the user for each subject, for all runs with equal devices and sizes.

[{"of": {"rows": 49152, "device": "NVIDIA H200", …}, "seconds": {"blocks": 0.0031, "pallas": 0.0012}}, …]

A cache only saves a few seconds at the start of a run, so errors in it are warnings.
"""

import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.errors import first_line
from moe_jax.files.atomic import reason, write_atomically
from moe_jax.files.untrusted import read_json

Times = dict[str, float]


class TimingCache(NamedTuple):
    """The cached times of one subject."""

    file: str  # its name
    subject: str  # for messages: a plural

    def path(self) -> Path:
        """The path, in XDG_CACHE_HOME or ~/.cache. Raises RuntimeError if the user has no home directory."""
        folder = os.environ.get("XDG_CACHE_HOME")
        return (Path(folder) if folder else Path.home() / ".cache") / "moe_jax" / self.file

    def read(self, key: Mapping[str, Any], names: Collection[str]) -> Times | None:
        """The cached times of these names in seconds, for a key of plain values; None if there are none."""
        try:
            entries = _entries(self.path())
        except (OSError, RuntimeError, ValueError) as error:
            _warn(f"cached times of {self.subject} cannot be read ({_reason(error)}): they are timed again")
            return None
        found: Times = next((each["seconds"] for each in entries if each["of"] == key), {})
        return {name: seconds for name, seconds in found.items() if name in names} or None

    def write(self, key: Mapping[str, Any], seconds: Times) -> None:
        """Add or replace the entry for a key; a damaged file is replaced."""
        try:
            file = self.path()
            try:
                others = [each for each in _entries(file) if each["of"] != key]
            except ValueError:
                others = []
            text = json.dumps([*others, {"of": key, "seconds": seconds}], indent=1)
            write_atomically(file, f"{text}\n", is_shared=True)
        except (OSError, RuntimeError) as error:
            _warn(f"times of {self.subject} cannot be cached ({_reason(error)}): the next run times them again")


def _entries(file: Path) -> list[dict[str, Any]]:
    """The entries of a cache file; none if it does not exist. Raises OSError, and ValueError for a damaged file."""
    if not file.exists():
        return []
    entries = read_json(file)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError(f"{file}: no list of times")
    return entries


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"of", "seconds"}
        and isinstance(entry["of"], dict)
        and isinstance(entry["seconds"], dict)
        and all(isinstance(each, float) and each > 0 for each in entry["seconds"].values())
    )


def _reason(error: Exception) -> str:
    return reason(error) if isinstance(error, OSError) else first_line(error)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
