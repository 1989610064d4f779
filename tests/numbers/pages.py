"""The numbers in tables of the documentation."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.results import ROOT

# Not a number of its own: part of a word (v5p, 1F1B, float32, 10⁻⁶) or of a format's name (8-bit).
NUMBER = re.compile(r"(?<![\w.,⁻])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w⁻]|-bit|\.\d)")


class Table(NamedTuple):
    """A table of a page."""

    head: str
    rows: list[str]


def path_of(page: str) -> Path:
    """README.md, or a file in docs/."""
    return ROOT / page if page == "README.md" else ROOT / "docs" / page


def tables_of(page: str) -> list[Table]:
    """Those of README.md, or of a page in docs/, in which there are numbers."""
    text = re.sub(r"^```.*?^```$", "", path_of(page).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = []
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [line.strip() for line in lines.splitlines()]
        if any(numbers_in(row) for row in rows):
            found.append(Table(head, rows))
    return found


def numbers_in(row: str) -> list[str]:
    """In order; those of names in code and of links do not count."""
    return NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", row))


def pages() -> list[str]:
    """The names of all."""
    return ["README.md", *sorted(path.name for path in Path(ROOT, "docs").glob("*.md"))]
