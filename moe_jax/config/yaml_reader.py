"""A strict subset of YAML for configs, in which a plain value has only one possible meaning."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from moe_jax.errors import ConfigError

# Unquoted values that are not text. PyYAML's own table follows YAML 1.1: it reads 3e-4 as text, 010 as 8, 1:30 as 90,
# and on as true.
_PLAIN = {
    "null": r"~|[nN]ull|NULL|",
    "bool": r"[tT]rue|TRUE|[fF]alse|FALSE",
    "int": r"[-+]?(0|[1-9][\d_]*)",
    "float": r"[-+]?((\d[\d_]*\.[\d_]*|\.\d+)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.inf)|\.nan",
}
_RESOLVERS = {None: [(f"tag:yaml.org,2002:{kind}", re.compile(f"({text})$")) for kind, text in _PLAIN.items()]}


_MOST_DEPTH = 20  # nested lists and sections
_MOST_VALUES = 10_000  # values, counted again for each alias that repeats them


class _Loader(yaml.SafeLoader):
    """YAML 1.2 and numbers such as 1_000, without duplicate keys or tags, with limits on depth and aliased values."""

    yaml_implicit_resolvers = _RESOLVERS

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._values = 0, 0
        self._sizes: dict[int, int] = {}  # the number of values in each complete node, by the node's id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self._values
        if getattr(event, "tag", None):
            raise _problem_at(event, f"a tag ({event.tag}), which no setting has")
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _problem_at(event, f"lists or sections nested more than {_MOST_DEPTH} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent) and id(node) not in self._sizes:
            raise _problem_at(event, f"an alias of what is around it (*{event.anchor})")
        self._values += self._sizes.get(id(node), 1)
        if self._values > _MOST_VALUES:
            raise _problem_at(event, f"more than {_MOST_VALUES:,} values")
        self._sizes[id(node)] = self._values - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key in (self.construct_object(key) for key, _ in node.value):
            if isinstance(key, Hashable):  # other keys are rejected below
                if key in keys:
                    line = node.start_mark.line + 1
                    raise ConfigError(
                        f"{node.start_mark.name}: key {key!r} stands twice in the section at line {line}: keep one"
                    )
                keys.add(key)
        return super().construct_mapping(node, deep)


def _problem_at(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=f"found {problem}", problem_mark=event.start_mark)  # type: ignore[arg-type]


class Dumper(yaml.SafeDumper):
    """A dumper that quotes strings which `_Loader` would read as another type."""

    yaml_implicit_resolvers = _RESOLVERS


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text; `name` identifies it in messages. Raises ConfigError."""
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number with thousands of digits
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{name}: {problem}{where}") from None
