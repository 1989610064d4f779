"""The records of a run as curves, and its key numbers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.report.plots import PlotLine
from moe_jax.telemetry.run_log import human_count, human_seconds, read_metrics

Records = Sequence[Mapping[str, Any]]


class ReportError(UserError):
    """A run that cannot be reported on."""


def records_of(run: Path) -> Records:
    """Return a run's records. Raises MetricsError (no such run, damaged records), or ReportError if there are none."""
    records = read_metrics(run)
    if not records:
        raise ReportError(f"run {run} has no records yet: wait until it has trained for log.every steps")
    return records


def curve(records: Records, key: str, name: str = "") -> PlotLine:
    """Return the values of `key` over steps, from the records that have it."""
    found = [record for record in records if key in record]
    steps = np.array([record["step"] for record in found], dtype=np.float64)
    return PlotLine(steps, np.array([record[key] for record in found], dtype=np.float64), name)


def key_numbers(records: Records) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the value and a remark for each key number that the records contain."""
    yield from _losses(records)
    steps, tokens, _ = curve(records, "tokens")
    if len(tokens):
        yield "Tokens seen", human_count(tokens[-1]), f"in {steps[-1]:,.0f} steps"
    for name, key, text in (
        ("Tokens per second", "tokens_per_s", human_count),
        ("Step time", "step_s", human_seconds),
        ("MFU", "mfu", "{:.1%}".format),
        ("Dropped share", "dropped_fraction", "{:.1%}".format),
        ("Load max/mean", "load_max_over_mean", "{:.2f}".format),
    ):
        yield from _typical(curve(records, key), name, text)


def not_finite(records: Records) -> list[int]:
    """Return the steps whose training loss is NaN or infinite."""
    return [record["step"] for record in records if not math.isfinite(record.get("loss", 0.0))]


def _losses(records: Records) -> Iterator[tuple[str, str, str]]:
    steps, values, _ = curve(records, "validation_loss")
    if np.isfinite(values).any():
        best = int(np.nanargmin(np.where(np.isfinite(values), values, np.nan)))
        for name, i in (("Best validation loss", best), ("Last validation loss", -1)):
            yield name, f"{values[i]:.3f}", f"{values[i] / math.log(2):.3f} bits per token, at step {steps[i]:,.0f}"
    steps, values, _ = curve(records, "loss")
    if len(values):
        _, cross_entropy, _ = curve(records, "cross_entropy")
        remark = f"cross-entropy {cross_entropy[-1]:.3f}, " if len(cross_entropy) else ""
        yield "Final training loss", f"{values[-1]:.3f}", f"{remark}at step {steps[-1]:,.0f}"


def _typical(curve: PlotLine, name: str, text: Callable[[float], str]) -> Iterator[tuple[str, str, str]]:
    values = curve.values[np.isfinite(curve.values)]
    if len(values) == 1:
        yield name, text(values[0]), "one record"
    elif len(values):
        low, middle, high = np.percentile(values, (10, 50, 90)).tolist()
        yield name, text(middle), f"median; 80% of records from {text(low)} to {text(high)}; last {text(values[-1])}"
