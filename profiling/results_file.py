"""Where benchmarks write: results/NAME.json, with provenance."""

import json
from pathlib import Path
from typing import Any

from moe_jax.measure.provenance import provenance

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, values: dict[str, Any]) -> Path:
    """Store and print the values of a benchmark."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(values | {"provenance": provenance()}, indent=2) + "\n")
    print(json.dumps(values, indent=2))
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path
