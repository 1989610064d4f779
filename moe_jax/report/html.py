"""HTML elements of the page: plots, tables and texts."""

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from moe_jax.files.untrusted import read_text


def plots(found: Iterable[tuple[str, str]], kind: str = "plots") -> str:
    """Return titles and SVGs as HTML figures next to each other; "" if there are none."""
    figures = "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>\n" for title, svg in found)
    return figures and f'<div class="{kind}">\n{figures}</div>\n'


def table(kind: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return an HTML table; each row is a name, followed by its values."""
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return f'<table class="{kind}">\n{lines}</table>\n'


def text(path: Path) -> str:
    """Return the text of a file as preformatted HTML; "" if the file does not exist."""
    if not path.is_file():
        return ""
    content = re.sub(r"[^\n\t\x20-\x7e\x80-\U0010ffff]", "�", read_text(path, errors="replace"))
    return f"<pre>{escape(content)}</pre>\n"
