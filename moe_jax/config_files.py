"""Config ↔ YAML files and `section.key=value` overrides."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from moe_jax.config import Config
from moe_jax.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise ConfigError(
                    f"{node.start_mark.name}: key {key!r} stands twice in the section at line {line}: keep one"
                )
        return super().construct_mapping(node, deep)


# PyYAML's own pattern wants a dot in every float and so reads 3e-4 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file (a run folder stands for its `config.yaml`), changed by `section.key=value` texts.

    Raises ConfigError for an unreadable file, an unknown key, a wrong type, or settings that contradict each other.
    """
    values = _read(Path(path)) if path is not None else {}
    for text in overrides:
        _override(values, text)
    return config_from(values)


def config_from(values: Mapping[str, Any]) -> Config:
    """The config of nested plain values. Raises ConfigError."""
    return typing.cast(Config, _build(Config, values, prefix=""))


def save_config(config: Config, path: Path) -> None:
    """Write every setting, defaults included, as YAML that `load_config` reads back to an equal config."""
    path.write_text(to_yaml(config))


def to_yaml(config: Config) -> str:
    """Every setting as YAML text."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.yaml"
    try:
        text = path.read_text()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1, cutoff=0.4)
        hint = f": did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"config file {path} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    values = _parse(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} holds {_kind(values)}, not sections: start it with e.g. 'model:'")
    return values


def _parse(text: str, name: str) -> Any:
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{name}: {problem}{where}") from None


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
    values[key] = _parse(value, f"override {text!r}") if value else ""


def _build(section: type, values: Any, prefix: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'the config'}={values!r} must be a section with keys {', '.join(fields)}"
        )
    arguments = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(f"unknown setting {name}: {_suggestion(str(key), prefix)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            arguments[key] = _build(typing.cast(type, hint), {} if value is None else value, f"{name}.")
        else:
            arguments[key] = _value(name, value, hint)
    return section(**arguments)


def _value(name: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            cure = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}={value} must be {' or '.join(allowed)}{cure}")
        return value
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
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
        return float(value)
    elif str in options and isinstance(value, str | int | float):
        return str(value)
    expected = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    raise ConfigError(f"{name}={value!r} must be {' or '.join(expected[o] for o in options)}, not {_kind(value)}")


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
    here = difflib.get_close_matches(f"{prefix}{key}", settings, n=1, cutoff=0.8)
    elsewhere = [name for name in settings if key in (last := name.rsplit(".", 1)[-1], _initials(last))]
    near = here or elsewhere or difflib.get_close_matches(f"{prefix}{key}", settings, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    siblings = sorted({name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)})
    return f"{prefix.rstrip('.') or 'a config'} has {', '.join(siblings)}"


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_"))


def setting_names(section: type, prefix: str = "") -> Iterator[str]:
    """Every dotted name below a section, e.g. `model.moe.top_k`."""
    for name, hint in typing.get_type_hints(section).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            yield from setting_names(typing.cast(type, hint), f"{prefix}{name}.")
