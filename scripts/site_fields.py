"""Extension of griffe (.mkdocs.yml): comments on fields are what the site says of them."""

import ast
import linecache
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Gives attributes without a docstring the comments above and behind them. Of settings, keeps fields alone."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, agent: Any, **kwargs: Any
    ) -> None:
        """Called for each attribute as it is read."""
        if attr.docstring is None and (comment := _comment(str(attr.filepath), attr.lineno or 0, attr.endlineno or 0)):
            attr.docstring = griffe.Docstring(comment, lineno=attr.lineno, parent=attr)
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "number":  # of its default and range
            attr.value = attr.value.arguments[0]

    def on_class(self, *, cls: griffe.Class, loader: Any, **kwargs: Any) -> None:
        """Called for each class once all is read."""
        if cls.path.startswith("moe_jax.config."):
            for name, member in list(cls.members.items()):
                if not member.is_attribute or "property" in member.labels:
                    cls.del_member(name)


def _comment(file: str, first: int, last: int) -> str:
    parts = [linecache.getline(file, last).rpartition("  # ")[2]] if "  # " in linecache.getline(file, last) else []
    while (line := linecache.getline(file, first - 1).strip()).startswith("# "):
        parts.insert(0, line.removeprefix("# "))
        first -= 1
    return " ".join(part.strip() for part in parts)
