"""The HTML page of a run: sections of tables, plots and texts. It can be written again while the run is training.

Evaluations are what `python -m moe_jax.evaluate` has added to the run's records.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from moe_jax import __version__
from moe_jax.config.yaml_io import load_config
from moe_jax.files.atomic import write_atomically
from moe_jax.files.local_copy import LOCK
from moe_jax.files.untrusted import read_json
from moe_jax.report.alarms import alarm_section
from moe_jax.report.html import CSS, plots, table, text
from moe_jax.report.load_plots import LOAD_LIMIT, Loads, RankMove, experts_svg, load_gradient, loads_of, ranks_svg
from moe_jax.report.numbers import Records, ReportError, curve, key_numbers, not_finite, records_of
from moe_jax.report.plots import SPANS, PlotLine, curves_svg
from moe_jax.telemetry.run_log import FILE_NAME, read_metrics

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


_LISTED_MOVES = 20  # the most moves of experts on the page
# For each section, the title, the record key and the axis options of its curves.
_CURVES: dict[str, tuple[tuple[str, str, dict[str, bool]], ...]] = {
    "Optimisation": (
        ("Learning rate", "learning_rate", {}),
        ("Gradient norm", "grad_norm", {"log_if_wide": True}),
        ("z-loss of the logits", "z_loss", {}),
        ("Loss of multi-token prediction", "mtp_loss", {}),
        ("Largest attention logit", "max_attention_logit", {"log_if_wide": True}),
    ),
    "Speed": (
        ("Tokens per second", "tokens_per_s", {"from_zero": True}),
        ("Model FLOP utilisation", "mfu", {"from_zero": True, "percent": True}),
    ),
    "Balance": (
        ("Load-balance loss", "load_balance_loss", {}),
        ("Router z-loss", "router_z_loss", {}),
        ("Dropped (token, expert) pairs", "dropped_fraction", {"from_zero": True, "percent": True}),
        ("Busiest expert / mean load", "load_max_over_mean", {}),
    ),
}


def write_report(run: Path, refresh_s: int | None = None) -> Path:
    """Write `report.html` into the run's folder and return its path.

    Browsers reload the page every `refresh_s` seconds. Raises MetricsError (no such run, damaged records), ReportError
    (no records, a damaged or unwritable file), or PlotError (matplotlib is not installed).
    """
    path, page = run / "report.html", _page(run, records_of(run), refresh_s)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}): make the folder writable") from None
    return path


def _page(run: Path, records: Records, refresh_s: int | None) -> str:
    name = escape(run.resolve().name)
    last_written = datetime.fromtimestamp((run / FILE_NAME).stat().st_mtime, UTC)
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">\n' if refresh_s else ""
    sections = "".join(
        f"<section><h2>{heading}</h2>\n{content}</section>\n" for heading, content in _sections(run, records) if content
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{refresh}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name} · moe_jax</title>
<style>{CSS}</style>
</head>
<body>
<header><h1>{name}</h1>
<p>Training run, up to step {records[-1]["step"]:,}; last record {last_written:%d %B %Y, %H:%M} UTC</p></header>
<main>
{sections}</main>
<footer>moe_jax {__version__}</footer>
</body>
</html>
"""


def _sections(run: Path, records: Records) -> Iterator[tuple[str, str]]:
    yield "Key numbers", _warning(records) + table("numbers", key_numbers(records))
    yield "Alarms", alarm_section(records)
    yield "Evaluations", evaluation_section(records)
    yield "Loss", _hint(records) + plots(_loss_plots(records))
    for heading, wanted in _CURVES.items():
        yield heading, plots(_curve_plots(records, wanted))
    loads = loads_of(records)
    yield "Rank load", _rank_section(loads)
    yield "Expert load", _expert_section(loads)
    yield "Sample", text(run / "sample.txt")
    yield "Config", text(run / "config.yaml")
    yield "Provenance", _provenance(run / "provenance.json")


def _warning(records: Records) -> str:
    steps = not_finite(records)
    if not steps:
        return ""
    return (
        f'<p class="warning">The training loss is not finite in {len(steps)} records, first at step {steps[0]:,}.</p>\n'
    )


def _hint(records: Records) -> str:
    if len(records) <= 3 * SPANS:
        return ""
    return (
        f"<p>Where a curve has many records, the faint line shows them, the strong one means over {SPANS} spans.</p>\n"
    )


def _loss_plots(records: Records) -> Iterator[tuple[str, str]]:
    key = "cross_entropy" if any("cross_entropy" in record for record in records) else "loss"
    sources = dict.fromkeys(name for record in records for name in record if name.startswith("validation_loss/"))
    named = {key: "training", "validation_loss": "validation"}
    named |= {name: f"validation, {name.partition('/')[2]}" for name in sources}
    curves = [found for found in (curve(records, name, text) for name, text in named.items()) if len(found.steps)]
    if not curves:
        return
    yield "Cross-entropy, nats per token", curves_svg("Loss", curves)
    half = records[-1]["step"] / 2
    late = [PlotLine(c.steps[c.steps > half], c.values[c.steps > half], c.name) for c in curves]
    if len(late[0].steps) >= 10:
        yield "The same, second half of the run", curves_svg("Loss, second half", [c for c in late if len(c.steps)])


def _curve_plots(records: Records, wanted: tuple[tuple[str, str, dict[str, bool]], ...]) -> Iterator[tuple[str, str]]:
    for title, key, options in wanted:
        values = curve(records, key)
        if len(values.steps):
            yield title, curves_svg(title, [values], **options)


def _rank_section(loads: Loads) -> str:
    """Return the busiest rank's load over time and around each move; "" for a run that never checks it."""
    if not len(loads.check_L):
        return ""
    text = (
        "<p>Load of the busiest rank over the steps between two checks, relative to the mean of all ranks. "
        "Lines: experts changed ranks.</p>\n"
    )
    plot = plots([("Busiest rank / mean load", ranks_svg(loads))], "wide")
    if not loads.moves:
        return text + plot
    left_out = len(loads.moves) - _LISTED_MOVES
    earlier = f"<p>The last {_LISTED_MOVES} moves; {left_out} before them.</p>\n" if left_out > 0 else ""
    return text + plot + earlier + table("numbers", map(_move_row, loads.moves[-_LISTED_MOVES:]))


def _move_row(move: RankMove) -> tuple[str, str, str]:
    after = move.planned if move.after is None else move.after
    found = "no check since" if move.after is None else "over the steps up to the next check"
    blocks = f"block{'s' if len(move.blocks) > 1 else ''} {', '.join(map(str, move.blocks))}"
    return (
        f"Step {move.step:,}",
        f"{move.before:.2f} → {after:.2f}",
        f"planned {move.planned:.2f}, {found}; {move.pairs} pair(s) of experts changed ranks in MoE {blocks}",
    )


def _expert_section(loads: Loads) -> str:
    """Return a heat map of each block; "" for a dense run."""
    if not len(loads.step_R):
        return ""
    blocks = range(loads.expert_RME.shape[1])
    marked = " Lines: experts changed ranks." if loads.moves else ""
    return (
        "<p>Routed pairs that each expert received, relative to an even share. Across: step; up: expert."
        f"{marked}</p>\n"
        '<p class="legend"><span>0, idle</span>'
        f'<span class="bar" style="background: {load_gradient()}"></span><span>{LOAD_LIMIT:g} × even or more</span>'
        "<span>(no colour: even)</span></p>\n"
        + plots(((f"MoE block {block}", experts_svg(loads, block)) for block in blocks), "panels")
    )


def _provenance(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        values = read_json(path)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ReportError(f"{path} is not a JSON object: delete the file, the report does without it")
    return table("facts", _flat(values))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def watch(run: Path, every_s: int) -> None:
    """Write the page every `every_s` seconds until the run's last step, or until Ctrl-C.

    Browsers reload the page as often. If the run has no records yet, wait for them. Raises the errors of
    `write_report`, and ConfigError if the run's config cannot be read.
    """
    if not _has_ended(run):
        print(f"renewing {run / 'report.html'} every {every_s} s until the last step; Ctrl-C stops", flush=True)
    try:
        while not _has_ended(run):
            if _so_far(run):
                write_report(run, refresh_s=every_s)
            time.sleep(every_s)
    except KeyboardInterrupt:
        pass
    if _so_far(run):
        print(f"wrote {write_report(run)}")


def _has_ended(run: Path) -> bool:
    """Whether the run has validated after its last step."""
    if not (records := _so_far(run)):
        return False
    steps = load_config(run).train.steps
    return any("validation_loss" in record and record["step"] >= steps for record in records)


def _so_far(run: Path) -> Records:
    """The records of a run; none while its step compiles, when it has only the lock of its folder."""
    return [] if (run / LOCK).exists() and not (run / FILE_NAME).exists() else read_metrics(run)
