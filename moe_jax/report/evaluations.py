"""The evaluations in a run's records: what `python -m moe_jax.evaluate` has added to them."""

import math
from collections.abc import Mapping
from typing import Any

from moe_jax.report.html import table
from moe_jax.report.numbers import Records

_PREFIX = "evaluation/"  # of metrics: evaluation/NAME/VALUE


def evaluation_section(records: Records) -> str:
    """Return the values by step and name, in the order of steps, as HTML for the page; "" without evaluations.

    Of several evaluations of one step with the same options on the same text, the last one counts.
    """
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    for record in records:
        for name, values in _by_name(record).items():
            found[record["step"], name, str(record.get("evaluation_options", ""))] = values
    rows = [(f"Step {step:,}", name, _values_text(values), options) for (step, name, options), values in found.items()]
    return table("numbers", rows) if rows else ""


def _by_name(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in record.items():
        if key.startswith(_PREFIX):
            name, _, of_value = key.removeprefix(_PREFIX).rpartition("/")
            found.setdefault(name, {})[of_value] = value
    return found


def _values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_value_text(value)}" for name, value in values.items())


def _value_text(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else "not finite"
