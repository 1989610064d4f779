"""Check before the first step that all processes of a run have the same settings and the same data.

Without it, a difference would go unnoticed: collectives work as long as the shapes agree, whatever each process trains.
"""

import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from moe_jax.config import Sections
from moe_jax.config.draft import Draft
from moe_jax.data.sources import Tokens
from moe_jax.data.tokens import SPLITS
from moe_jax.distributed.hosts import conclusion, coordination
from moe_jax.errors import ConfigError
from moe_jax.files.local_copy import local_path
from moe_jax.files.untrusted import read_bytes

# Settings that may differ between processes, as they are paths on a process's own host, or depend on it. The contents
# of the files (except safety copies) are compared instead: data and measured times of tasks in this file, clusters and
# tuned settings where they are read, and initial parameters like all replicas (checkpoint/checksums.py).
_MAY_DIFFER = {
    "data.path",
    "data.sources.path",
    "data.tokenizer",
    "data.prefetch",
    "train.init_from",
    "tune.cache",
    "plan.cluster",
    "schedule.task_times",
    "checkpoint.safety_copies_dir",
}
_TIMEOUT_S = 3600  # other processes may have a long text to read; jax notices a lost process after 30 seconds
_numbers = itertools.count()

Values = Mapping[str, str]


def check_same_settings(sections: Sections) -> None:
    """Raise ConfigError on all processes unless all have the same settings. All processes call it."""
    if not _has_other_processes():
        return
    values = shared_settings(sections)
    if isinstance(sections, Draft):
        values |= dict.fromkeys(sections.open, "auto")
    values |= _content("schedule.task_times", sections.schedule.task_times)
    _check_same(values, "give all processes the same config and settings")


def shared_settings(sections: Sections) -> dict[str, str]:
    """The settings that must be the same on all processes of a run: their values as text, by full name."""
    settings = _settings(sections).items()
    return {name: _text(value) for name, value in settings if re.sub(r"\[\d+\]", "", name) not in _MAY_DIFFER}


def check_same_data(sources: Sequence[Tokens]) -> None:
    """Raise ConfigError on all processes unless all have the same tokens. All processes call it."""
    if not _has_other_processes():
        return
    values = {name: text for tokens in sources for name, text in _tokens(tokens).items()}
    paths = ", ".join(str(tokens.path) for tokens in sources)
    here = f"here it is {paths}" if len(sources) == 1 else f"here they are {paths}"
    _check_same(values, f"give all processes copies of one text ({here})")


def _tokens(tokens: Tokens) -> dict[str, str]:
    """The number of tokens, their type and checksum for each split of a source, as text."""
    if (meta := tokens.meta) is not None:
        content = {split: (meta.count(split), meta.dtype, meta.crc32(split)) for split in SPLITS}
    else:
        parts = {split: getattr(tokens, split) for split in SPLITS}
        content = {split: (len(part), str(part.dtype), zlib.crc32(part.data)) for split, part in parts.items()}
    return {
        f"{tokens.setting} ({split} part)": f"{count} tokens of {dtype} with crc32 {crc32:08x}"
        for split, (count, dtype, crc32) in content.items()
    }


def _check_same(own: Values, cure: str) -> None:
    """Compare values over all processes, on process 0. Raises ConfigError, which ends with `cure`, on all of them."""
    if not _has_other_processes():
        return

    def compare(texts: list[str]) -> str:
        others = enumerate(map(json.loads, texts[1:]), 1)
        differences = [each for process, other in others for each in _differences(own, other, process)]
        return "; ".join(differences[:3])

    problem = conclusion(f"moe_jax_alike_{next(_numbers)}", json.dumps(dict(own)), compare, _TIMEOUT_S)
    if problem:
        raise ConfigError(f"{problem}: {cure}")


def _differences(here: Values, there: Values, process: int) -> list[str]:
    return [
        f"{name} is {here.get(name, 'unknown')} on process 0 and {there.get(name, 'unknown')} on process {process}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def _has_other_processes() -> bool:
    """Whether the run has several processes.

    Does not start jax's devices: processes with different settings may not be able to do so together.
    """
    return jax.distributed.is_initialized() and coordination().num_processes > 1


def _settings(sections: Any, name: str = "") -> dict[str, Any]:
    """All settings by their full names, such as `train.steps` and `data.sources[0].weight`."""
    found: dict[str, Any] = {}
    if isinstance(sections, tuple) and any(map(dataclasses.is_dataclass, sections)):
        for number, item in enumerate(sections):
            found |= _settings(item, f"{name}[{number}]")
        return found
    if not dataclasses.is_dataclass(sections):
        return {name: sections}
    for part in dataclasses.fields(Sections if isinstance(sections, Sections) else sections):
        found |= _settings(getattr(sections, part.name), f"{name}.{part.name}".lstrip("."))
    return found


def _text(value: object) -> str:
    """A value as it is written in a config."""
    return json.dumps(value) if not isinstance(value, str) else value


def _content(name: str, file: str | None) -> Values:
    """The checksum of a file that a setting names, as text."""
    if file is None:
        return {name: "null"}
    try:
        return {name: f"a file with crc32 {zlib.crc32(read_bytes(local_path(file))):08x}"}
    except OSError as error:
        return {name: f"a file that cannot be read ({error.strerror})"}
