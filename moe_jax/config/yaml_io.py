"""Reading and writing configs as YAML, with `section.key=value` overrides."""

import copy
import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from moe_jax.config import Config, Sections
from moe_jax.config.draft import PLANNED, Draft
from moe_jax.config.renamed import RENAMED, RENAMED_VALUES, with_new_names
from moe_jax.config.validate import check_overrides, plain_setting
from moe_jax.config.yaml_reader import Dumper, parse_yaml
from moe_jax.errors import ConfigError, as_yaml
from moe_jax.files.places import parse_place
from moe_jax.files.untrusted import read_text
from moe_jax.paths import names_path

_MOST_BYTES = 2**20  # the most bytes of a config file
_MOST_SHOWN = 200  # the most characters of a value in a message


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a YAML file, changed by `section.key=value` overrides.

    For the folder of a run, its `config.yaml` is read. Raises ConfigError for an unreadable file, an unknown key, a
    wrong type, settings that contradict each other, or a setting that is `auto`.
    """
    return _closed(load_draft(path, overrides))


def load_draft(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Draft:
    """Return the same as a draft, whose settings may be `auto` and may contradict each other. Raises ConfigError."""
    if isinstance(path, str):
        path = parse_place("config file", path)
    values = _read(path) if path is not None else {}
    _override_all(values, overrides)
    return _draft_from(values)


def config_from(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the config of nested plain values, changed by `section.key=value` overrides. Raises ConfigError."""
    changed = copy.deepcopy(dict(values))
    _override_all(changed, overrides)
    return _closed(_draft_from(changed))


def _closed(draft: Draft) -> Config:
    if draft.open:
        raise ConfigError(
            f"{min(draft.open)}=auto is open here: give a value, or the config that python -m moe_jax.plan --out writes"
        )
    return draft.choose()


def _draft_from(values: Mapping[str, Any]) -> Draft:
    open_names: set[str] = set()
    sections = _arguments(Sections, values, "", open_names)
    return Draft(**sections, open=frozenset(open_names), given=frozenset(_given_names(values)))


def _given_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of each setting in nested plain values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _given_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def to_yaml(config: Config) -> str:
    """Return every setting, defaults included, as YAML that `load_config` reads back to an equal config."""
    return yaml.dump(dataclasses.asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            path = path / "config.yaml"
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError:
        names = [p.name for p in path.parent.glob("*") if p.suffix == ".yaml" or (p / "config.yaml").exists()]
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
        cure = f"did you mean {path.parent / near[0]}?" if near else "name a YAML file, or the folder of a run"
        raise ConfigError(f"config file {path} does not exist: {cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config file {path} cannot be read ({reason}): name a YAML file") from None
    values = parse_yaml(text, str(path))
    if values is None and path.name == "config.yaml":  # a run writes all its settings into this file
        raise ConfigError(f"config file {path} is empty: put the run's own there again, or name another file or folder")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} holds {_kind(values)}, not sections: start it with e.g. 'model:'")
    return with_new_names(values) if path.name == "config.yaml" else values  # an earlier version may have written it


def _override_all(values: dict[str, Any], overrides: Sequence[str]) -> None:
    for text in overrides:
        _override(values, text)
    check_overrides(values, overrides)


def _override(values: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"override {text!r} is not of the form section.key=value, e.g. train.steps=100")
    *sections, key = name.split(".")
    for section in sections:
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {text!r}: {section} is a value, not a section")
        values = inner
    found = parse_yaml(value, f"override {text!r}") if value else ""
    if found is None and name in _SECTIONS:
        dense = ": set model.moe.num_experts=0 for a model without experts" if name == "model.moe" else ""
        raise ConfigError(f"override {text!r}: {name} is a section, and null would leave it as it is{dense}")
    if isinstance(found, Mapping) and name in _SECTIONS:  # it would reset the section's other settings
        single = " ".join(_as_overrides(found, f"{name}.")) or f"{name}.key=value"
        raise ConfigError(f"override {text!r}: {name} is a section: write {_short(single)}")
    values[key] = found


def _as_overrides(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield an override for each setting in nested plain values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _as_overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value if isinstance(value, str) else _as_written(value)}"


def _arguments(section: type, values: Any, prefix: str, open_names: set[str]) -> dict[str, Any]:
    """Return the arguments of a section's constructor. Settings that are `auto` are added to `open_names` instead."""
    fields = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'the config'}={_shown(values)} must be a section with keys {', '.join(fields)}"
        )
    arguments = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in RENAMED:
            raise ConfigError(f"unknown setting {name}: did you mean {prefix}{RENAMED[name]}? It was renamed")
        if key not in fields:
            raise ConfigError(f"unknown setting {name}: {_suggestion(str(key)[:_MOST_SHOWN], prefix)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            inner = {} if value is None else value
            section_type = typing.cast(type, hint)
            arguments[key] = section_type(**_arguments(section_type, inner, f"{name}.", open_names))
        elif value == "auto" and name in PLANNED:
            open_names.add(name)
        else:
            arguments[key] = _value(name, value, hint)
    return arguments


def _value(name: str, value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is not None:  # a list, or null
        hint = next((each for each in options if typing.get_origin(each) is tuple), hint)
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        of_item = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(of_item):
            return tuple(_item(f"{name}[{number}]", item, of_item) for number, item in enumerate(items))
        return tuple(_value(name, item, of_item) for item in items)
    if typing.get_origin(hint) is Literal:
        return _choice(name, value, typing.get_args(hint))
    if value is None and type(None) in options:
        return None
    if isinstance(value, bool):
        if bool in options:
            return value
    elif int in options and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e4 steps
    elif int in options and isinstance(value, int):
        return value
    elif float in options and isinstance(value, int | float):
        return value if isinstance(value, float) else _float(value)
    elif str in options and isinstance(value, str):
        if strange := re.search(r"[\0\ud800-\udfff]", value):
            raise ConfigError(
                f"{name}={_shown(value)} has the character U+{ord(strange[0]):04X}, which no text or name of a file "
                "has: use it without"
            )
        return plain_setting(name, value) if names_path(name) else value
    _refuse_auto(name, value)
    raise _wrong_kind(name, value, options)


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if any(value == each and type(value) is type(each) for each in allowed):  # true == 1 in Python
        return value
    _refuse_auto(name, value)
    words = list(map(str, allowed))
    near = difflib.get_close_matches(str(value)[:_MOST_SHOWN], [*words, "auto"] if name in PLANNED else words, n=1)
    cure = f": did you mean {near[0]}?" if near else ""
    if renamed := isinstance(value, str) and RENAMED_VALUES.get((name, value)):
        cure = f": did you mean {renamed}? It was renamed"
    raise ConfigError(f"{name}={_short(str(as_yaml(value)))} must be {' or '.join(words)}{cure}")


def _wrong_kind(name: str, value: Any, options: tuple[Any, ...]) -> ConfigError:
    expected = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    cure = ": put it in quotes" if str in options and isinstance(value, bool | int | float) else ""
    if name in PLANNED and difflib.get_close_matches(str(value)[:_MOST_SHOWN], ["auto"]):
        cure = ": did you mean auto?"
    kinds = " or ".join(expected[o] for o in options)
    other = "" if int in options and isinstance(value, float) else f", not {_kind(value)}"  # 0.5 and nan are numbers
    return ConfigError(f"{name}={_shown(value)} must be {kinds}{other}{cure}")


def _item(name: str, values: Any, kind: Any) -> Any:
    """Return an item of a list of sections."""
    hints = typing.get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}={_shown(values)} must be a section with keys {', '.join(hints)}")
    for key in values:
        if key not in hints:
            near = difflib.get_close_matches(str(key)[:_MOST_SHOWN], hints, n=1)
            *others, last = hints
            cure = f"did you mean {near[0]}? use that name" if near else f"use {', '.join(others)} or {last}"
            raise ConfigError(f"unknown setting {name}.{_short(str(key))}: {cure}")
    missing = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    for key in missing:
        if key not in values:
            raise ConfigError(f"{name} has no {key}: set it, as in {{{key}: …}}")
    return kind(**{key: _value(f"{name}.{key}", value, hints[key]) for key, value in values.items()})


def _float(value: int) -> float:
    return float(value) if abs(value) <= sys.float_info.max else math.inf if value > 0 else -math.inf


def _refuse_auto(name: str, value: Any) -> None:
    if value == "auto":
        raise ConfigError(
            f"{name}=auto: nothing chooses it, so give a value (auto is for {', '.join(sorted(PLANNED))})"
        )


def _shown(value: Any) -> str:
    """A value as it is written in YAML, cut if it is long."""
    return _short(_as_written(value))


def _as_written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_written, value[:_MOST_SHOWN]))}]"
    return str(as_yaml(value)) if value is None or isinstance(value, bool) else repr(value)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _kind(value: Any) -> str:
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a section",
    }
    return kinds.get(type(value), "null" if value is None else "a date")


def _suggestion(key: str, prefix: str) -> str:
    names = list(setting_names(Config))
    settings = [name for name in names if not any(n.startswith(f"{name}.") for n in names)] if prefix else names

    def likeness(name: str) -> float:
        last = name.rpartition(".")[2]
        initials = "".join(word[0] for word in last.split("_"))  # lr
        if key.replace("_", "") == last.replace("_", "") or (key == initials and len(key) > 1):
            alike = 1.0
        elif key in last and len(key) > 3:  # warmup
            alike = 0.9
        else:
            alike = difflib.SequenceMatcher(None, key, last).ratio()
        return alike + (0.15 if name == prefix + last else 0)

    nearest = max(settings, key=likeness)
    if likeness(nearest) > 0.8:
        return f"did you mean {nearest}?"
    siblings = sorted({name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)})
    return f"{prefix.rstrip('.') or 'a config'} has {', '.join(siblings)}"


def setting_names(section: type, prefix: str = "") -> Iterator[str]:
    """Yield every dotted name below a section, e.g. `model.moe.top_k`."""
    for name, hint in typing.get_type_hints(section).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            yield from setting_names(typing.cast(type, hint), f"{prefix}{name}.")


_SECTIONS = {name.rpartition(".")[0] for name in setting_names(Config)}
