"""Result files of benchmarks: results/NAME.json, with provenance."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_jax.measure.interleaved_timing import Quartiles
from moe_jax.measure.provenance import provenance

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, values: dict[str, Any], quick: bool = False) -> Path:
    """Write and print the values of a benchmark; those of a `quick` run go to a separate file."""
    name = f"{name}.quick" if quick else name
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(values | {"provenance": provenance()}, indent=2) + "\n")
    print(json.dumps(values, indent=2))
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def with_earlier(name: str, key: str, found: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a benchmark that measured only some of the entries of `key`: `found`, with facts `about` it.

    The other entries of the results file stay, and what it said about these is kept under `others`.
    """
    before = json.loads((RESULTS / f"{name}.json").read_text())
    entries: dict[str, Any] = before.pop(key)
    return about | {"measured": sorted(found), "others": before, key: entries | found}


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and quartiles, by their names in result files."""
    found = Quartiles.of(values)
    named = {"median": found.median, "first_quartile": found.first, "third_quartile": found.third}
    return {name: rounded(value) for name, value in named.items()}
