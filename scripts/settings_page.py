"""Write docs/settings.md from the comments on the fields of settings: python scripts/settings_page.py"""

import ast
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from site_fields import comment_of

from moe_jax.config.sections import Sections
from moe_jax.errors import CommandParser, run_command
from moe_jax.files.atomic import write_atomically

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_HEAD = """# Settings

All settings with their types and defaults. A config file and the command line name them by section:
`model.moe.top_k=2`. What values they may have is checked before a run starts; an invalid value is refused with one line
that says how to fix it.

`scripts/settings_page.py` writes this page from the comments on the fields in
[moe_jax/config/sections/](../moe_jax/config/sections/).
"""
_PLAIN = {int: "`int`", float: "`float`", bool: "`bool`", str: "`str`", types.NoneType: "`null`"}
_TABLE = "| setting | type | default | meaning |\n|---|---|---|---|"


def main() -> None:
    """Write the page."""
    CommandParser(prog="python scripts/settings_page.py", description=__doc__).parse_args()
    write_atomically(PAGE, page())
    print(f"written: {PAGE}")


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_sections(Sections, "")])


def _sections(section: type, prefix: str) -> Iterator[str]:
    """Yield the tables of a section's sections, and those of the items of its lists."""
    for name, kind in get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _section(kind, f"{prefix}{name}", f"{prefix}{name}.")
        elif items := [item for item in get_args(kind) if dataclasses.is_dataclass(item)]:
            yield from _section(items[0], f"Each of {prefix}{name}", "")


def _section(section: Any, title: str, prefix: str) -> Iterator[str]:
    yield f"## {title}\n\n{_linked(inspect.getdoc(section))}\n\n{_TABLE}"
    comments, hints = _comments(section), get_type_hints(section)
    for field in dataclasses.fields(section):
        if not dataclasses.is_dataclass(hints[field.name]):
            cells = (f"`{prefix}{field.name}`", _kind(hints[field.name]), _default(field.default), comments[field.name])
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _sections(section, prefix)


def _comments(section: type) -> dict[str, str]:
    """Return the comment of each field of a class."""
    file, (_, above) = inspect.getsourcefile(section) or "", inspect.getsourcelines(section)
    [tree] = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        line.target.id: _linked(comment_of(file, above - 1 + line.lineno, above - 1 + (line.end_lineno or line.lineno)))
        for line in tree.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _linked(comment: str | None) -> str:
    """Return a comment for a cell of a table, with links to the pages that it names."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", (comment or "").replace("|", r"\|").strip())


def _kind(kind: Any) -> str:
    """Return a type as users write its values."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(kind) is tuple:
        item = "sections" if dataclasses.is_dataclass(arguments[0]) else _kind(arguments[0])
        return f"list of {item.replace('list', 'lists')}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    return _PLAIN[kind]


def _default(value: Any) -> str:
    """Return a default as a config file has it."""
    if value is dataclasses.MISSING:
        return "required"
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    return f"`{value if is_plain else json.dumps(value)}`"


if __name__ == "__main__":
    run_command(main)
