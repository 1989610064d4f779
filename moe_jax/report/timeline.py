"""Timelines of a step (predicted, compiled, measured), as a picture and as a Chrome/Perfetto trace."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moe_jax.measure.overlap import Replay
from moe_jax.measure.tasks import action_of
from moe_jax.measure.trace import TracedOperation
from moe_jax.plan.simulate import Timeline
from moe_jax.report.plots import PlotError
from moe_jax.schedule.actions import Stream


class Bar(NamedTuple):
    """One task on a stream of a timeline."""

    name: str
    stream: str
    start_s: float
    end_s: float


Timelines = Mapping[str, Sequence[Bar]]  # the bars of each timeline, by its name

_COLORS = {
    "attend": "#4c78a8",
    "expert": "#f2a541",
    "dispatch": "#54a24b",
    "combine": "#88c07f",
    "gather": "#2f8f83",
    "scatter": "#7fc4bb",
    "parameters": "#d6a5c9",
    "reduce": "#b279a2",
    "counts": "#9d755d",
    "embed": "#79a9d1",
    "head": "#e45756",
    "forward": "#a9bdd4",
    "backward": "#7f9ab8",
}
_OTHER = "#bab0ac"
_WORDS = {  # in the legend
    "parameters": "gathers of parameters",
    "reduce": "sums of gradients",
    "counts": "sum of routers' counts",
    "forward": "forward, of no task",
    "backward": "backward, of no task",
}
_CHARACTER = 0.004  # of the length of a picture, as wide as a character of a bar's text


def predicted_bars(timeline: Timeline) -> list[Bar]:
    """Return the bars of a simulated schedule."""
    return [Bar(str(task.action), task.stream.value, task.start_s, task.end_s) for task in timeline.tasks]


def compiled_bars(replay: Replay) -> list[Bar]:
    """Return the bars of a replayed program."""
    compute = []
    for task in replay.compute:
        action = action_of(task.op_name)
        compute.append(Bar(str(action or _short(task.op_name)), Stream.COMPUTE, task.start_s, task.end_s))
    bars = _joined(compute, 1e-9)
    for transfer in replay.collectives:
        name = str(action_of(transfer.op_name) or _exchange(transfer.op_name) or transfer.kind)
        bars.append(Bar(name, Stream.COMMUNICATION, transfer.start_s, transfer.end_s))
    return bars


def measured_bars(operations: Sequence[TracedOperation]) -> list[Bar]:
    """Return the bars of one device's traced operations."""
    start_s = min(operation.start_s for operation in operations)
    invisible_s = (max(operation.end_s for operation in operations) - start_s) / 2000
    bars: dict[bool, list[Bar]] = {False: [], True: []}
    for each in sorted(operations, key=lambda operation: operation.start_s):
        stream = Stream.COMMUNICATION if each.communicates else Stream.COMPUTE
        rest = each.name.rstrip(".0123456789") if each.communicates else "other"
        name = {"F": "forward", "B": "backward"}.get(each.task, each.task or rest)
        bars[each.communicates].append(Bar(name, stream, each.start_s - start_s, each.end_s - start_s))
    return _joined(bars[False], invisible_s) + _joined(bars[True], invisible_s)


def _joined(bars: Sequence[Bar], gap_s: float) -> list[Bar]:
    """Return the bars of a stream with neighbours of one name joined if the gap between them is below `gap_s`."""
    result: list[Bar] = []
    for bar in bars:
        if result and bar.name == result[-1].name and bar.start_s - result[-1].end_s < gap_s:
            result[-1] = bar._replace(start_s=result[-1].start_s, end_s=max(bar.end_s, result[-1].end_s))
        else:
            result.append(bar)
    return result


def _short(op_name: str) -> str:
    """Return the phase of autodiff for an instruction without a task: forward, backward or other."""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "other"


def _exchange(op_name: str) -> str:
    """Return the operation that an unscheduled collective belongs to, or ""."""
    scopes = {"dispatch": "dispatch", "combine": "combine", "grad_reduce": "reduce"}
    return next((name for scope, name in scopes.items() if scope in op_name), "")


def write_trace(timelines: Timelines, path: Path) -> None:
    """Write JSON for chrome://tracing and ui.perfetto.dev, with a process per timeline and a thread per stream.

    Bars of a stream that overlap are put into separate threads, since bars of a thread may only be nested.
    """
    events: list[dict[str, Any]] = []
    for process, (title, bars) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        streams = dict.fromkeys(bar.stream for bar in bars)
        threads = [(stream, row) for stream in streams for row in _rows([bar for bar in bars if bar.stream == stream])]
        for thread, (stream, row) in enumerate(threads):
            place = {"pid": process, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": str(stream)}})
            for bar in row:
                start_us, end_us = bar.start_s * 1e6, bar.end_s * 1e6
                events.append({"ph": "X", "name": bar.name, "ts": start_us, "dur": end_us - start_us, **place})
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def _rows(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Return the bars in the smallest number of rows in which no bars overlap."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        free = next((row for row in rows if row[-1].end_s <= bar.start_s + 1e-9), None)
        if free is None:
            rows.append([bar])
        else:
            free.append(bar)
    return rows


def draw(timelines: Timelines, file: Path | BinaryIO, title: str, scales: Mapping[str, float] | None = None) -> None:
    """Draw timelines as a PNG on a common time axis. Wide bars of tasks have their block and part, such as 0.1.

    The times of a timeline in `scales` are divided by its factor, and it gets an axis of its own, above. Raises
    PlotError if matplotlib is not installed.
    """
    scales = scales or {}
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install -e '.[plots]'") from None
    rows = [(name, stream) for name, bars in timelines.items() for stream in dict.fromkeys(bar.stream for bar in bars)]
    figure = Figure(figsize=(14, 0.8 + 0.5 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="ms")
    axes.set_title(title, fontsize=10)
    length_ms = max(bar.end_s * 1e3 / scales.get(name, 1.0) for name, bars in timelines.items() for bar in bars)
    narrow_ms = length_ms / 500  # an edge would hide narrower bars
    # backward passes and weight gradients are hatched, to be visible in black and white
    hatches = {"B": "///", "W": "...", "P": "", "G": "", "F": ""}
    for y, (name, stream) in enumerate(rows):
        bars = [bar for bar in timelines[name] if bar.stream == stream]
        ms = 1e3 / scales.get(name, 1.0)
        spans = [(bar.start_s * ms, (bar.end_s - bar.start_s) * ms) for bar in bars]
        colors = [_COLORS.get(_op(bar.name), _OTHER) for bar in bars]
        for direction, hatch in [*hatches.items(), ("", "")]:
            chosen = [i for i, bar in enumerate(bars) if _direction(bar.name) == direction]
            axes.broken_barh(
                [spans[i] for i in chosen],
                (y - 0.4, 0.8),
                facecolors=[colors[i] for i in chosen],
                edgecolor="white",
                linewidth=[0.2 if spans[i][1] > narrow_ms else 0 for i in chosen],
                hatch=hatch,
            )
        for bar, (start_ms, width_ms) in zip(bars, spans, strict=True):
            if 0 < len(text := _place(bar.name)) * _CHARACTER * length_ms < width_ms:
                axes.text(start_ms + width_ms / 2, y, text, fontsize=5, ha="center", va="center")
        if y and name != rows[y - 1][0]:
            axes.axhline(y - 0.5, color="lightgrey", linewidth=0.6)
    labels = [f"{name} (axis above)" if name in scales else name for name, _ in rows]
    axes.set_yticks(range(len(rows)), [f"{label}: {stream}" for label, (_, stream) in zip(labels, rows, strict=True)])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, length_ms)
    axes.spines[["top", "right"]].set_visible(False)
    for name, scale in scales.items():
        above = axes.secondary_xaxis("top", functions=(partial(mul, scale), partial(mul, 1 / scale)))
        above.set_xlabel(f"ms of {name}: {scale:.3g} × the axis below")
    pixel_ms = length_ms / (figure.get_figwidth() * figure.dpi)
    visible = [
        bar.name
        for name, bars in timelines.items()
        for bar in bars
        if (bar.end_s - bar.start_s) * 1e3 / scales.get(name, 1.0) >= pixel_ms
    ]
    seen, directions = set(map(_op, visible)), set(map(_direction, visible))
    patches = [Patch(facecolor=color, label=_WORDS.get(op, op)) for op, color in _COLORS.items() if op in seen]
    patches += [Patch(facecolor=_OTHER, label="other")] if seen - set(_COLORS) else []
    patches += [
        Patch(facecolor="white", edgecolor="grey", hatch=hatches[direction], label=label)
        for direction, label in (("B", "backward"), ("W", "weight gradients alone"))
        if direction in directions
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=7)
    figure.savefig(file, format="png")


def _op(name: str) -> str:
    """Return the op in an action's name: `reduce` for all sums of gradients, `parameters` for all gathers of these.
    Other names are returned unchanged.
    """
    direction = _direction(name)
    if not direction:
        return name
    if direction == "P":
        return "parameters"
    op = name.split(".")[1]
    return "reduce" if direction == "G" and op != "counts" else op


def _direction(name: str) -> str:
    head, dot, _ = name.partition(".")
    return head if dot and head in ("F", "B", "W", "P", "G") else ""


def _place(name: str) -> str:
    """Return the block and part in an action's name, as far as it has them; "" for other names."""
    return ".".join(name.split(".")[2:]) if _direction(name) else ""
