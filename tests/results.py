"""Committed results, and tables of the documentation that show them."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "profiling" / "results" / f"{name}.json").read_text())
    return found


def rows(name: str) -> dict[str, list[str]]:
    """The rows of all tables of a page: the first cell and the others."""
    lines = (ROOT / "docs" / f"{name}.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return {first: others for first, *others in cells}


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
