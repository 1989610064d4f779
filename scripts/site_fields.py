"""Extension of griffe (.mkdocs.yml) that documents fields by their comments."""

import ast
import linecache
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Uses the comments above and after an attribute as its docstring; keeps only the fields of settings."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, agent: Any, **kwargs: Any
    ) -> None:
        """Add the comments to an attribute; griffe calls this for each one that it reads."""
        comment = comment_of(str(attr.filepath), attr.lineno or 0, attr.endlineno or 0)
        if attr.docstring is None and comment:
            attr.docstring = griffe.Docstring(comment, lineno=attr.lineno, parent=attr)

    def on_class(self, *, cls: griffe.Class, loader: Any, **kwargs: Any) -> None:
        """Remove methods and properties from a section of settings; griffe calls this for each class it has read."""
        if cls.path.startswith("moe_jax.config."):
            for name, member in list(cls.members.items()):
                if not member.is_attribute or "property" in member.labels:
                    cls.del_member(name)


def comment_of(file: str, first: int, last: int) -> str:
    """Return the comments above and after a statement, from its first to its last line."""
    parts = [linecache.getline(file, last).rpartition("  # ")[2]] if "  # " in linecache.getline(file, last) else []
    while (line := linecache.getline(file, first - 1).strip()).startswith("# "):
        parts.insert(0, line.removeprefix("# "))
        first -= 1
    return " ".join(part.strip() for part in parts)
