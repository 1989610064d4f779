"""Timelines of a step under each other: predicted, compiled, measured, as a picture and as a Chrome/Perfetto trace."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.measure.overlap import Replay
from moe_jax.measure.tasks import action_of
from moe_jax.plan.simulate import Timeline
from moe_jax.report.plots import PlotError
from moe_jax.schedule.actions import Stream


class Bar(NamedTuple):
    """One task on a stream of a timeline."""

    name: str
    stream: str
    start_s: float
    end_s: float


Timelines = Mapping[str, Sequence[Bar]]  # what each is called → its bars; any number, from anywhere

_COLORS = {
    "attend": "#4c78a8",
    "expert": "#f2a541",
    "dispatch": "#54a24b",
    "combine": "#88c07f",
    "gather": "#2f8f83",
    "scatter": "#7fc4bb",
    "reduce": "#b279a2",
    "counts": "#9d755d",
    "embed": "#79a9d1",
    "head": "#e45756",
    "forward": "#a9bdd4",
    "backward": "#7f9ab8",
}
_OTHER = "#bab0ac"


def predicted_bars(timeline: Timeline) -> list[Bar]:
    """A simulated schedule."""
    return [Bar(str(task.action), task.stream.value, task.start_s, task.end_s) for task in timeline.tasks]


def compiled_bars(replay: Replay) -> list[Bar]:
    """A replayed program; neighbouring instructions of one task are one bar."""
    bars: list[Bar] = []
    for task in replay.compute:
        action = action_of(task.op_name)
        name = str(action) if action else _short(task.op_name)
        if bars and bars[-1].name == name and task.start_s - bars[-1].end_s < 1e-9:
            bars[-1] = bars[-1]._replace(end_s=task.end_s)
        else:
            bars.append(Bar(name, Stream.COMPUTE, task.start_s, task.end_s))
    for transfer in replay.collectives:
        name = str(action_of(transfer.op_name) or _exchange(transfer.op_name) or transfer.kind)
        bars.append(Bar(name, Stream.COMMUNICATION, transfer.start_s, transfer.end_s))
    return bars


def _short(op_name: str) -> str:
    """Forward, backward or neither: all that autodiff tells of an instruction without a task."""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "other"


def _exchange(op_name: str) -> str:
    """What an unscheduled collective moves."""
    scopes = {"dispatch": "dispatch", "combine": "combine", "grad_reduce": "reduce"}
    return next((name for scope, name in scopes.items() if scope in op_name), "")


def write_trace(timelines: Timelines, path: Path) -> None:
    """As JSON that chrome://tracing and ui.perfetto.dev open: one process per timeline, one thread per stream."""
    events: list[dict[str, Any]] = []
    for process, (title, bars) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        streams = list(dict.fromkeys(bar.stream for bar in bars))
        for thread, stream in enumerate(streams):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": str(stream)}}
            )
        for bar in bars:
            start_us, end_us = bar.start_s * 1e6, bar.end_s * 1e6
            place = {"pid": process, "tid": streams.index(bar.stream)}
            events.append({"ph": "X", "name": bar.name, "ts": start_us, "dur": end_us - start_us, **place})
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def draw(timelines: Timelines, path: Path, title: str) -> None:
    """As a picture, all on one time axis. Raises PlotError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install 'moe_jax[plots]'") from None
    rows = [(name, stream) for name, bars in timelines.items() for stream in dict.fromkeys(bar.stream for bar in bars)]
    figure = Figure(figsize=(14, 0.8 + 0.5 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="ms")
    for y, (name, stream) in enumerate(rows):
        bars = [bar for bar in timelines[name] if bar.stream == stream]
        spans = [(bar.start_s * 1e3, (bar.end_s - bar.start_s) * 1e3) for bar in bars]
        colors = [_COLORS.get(_op(bar.name), _OTHER) for bar in bars]
        # backward and weight gradients: hatched, so that black and white shows them
        hatches = {"B": "///", "W": "...", "G": "", "F": ""}
        for direction, hatch in [*hatches.items(), ("", "")]:
            chosen = [i for i, bar in enumerate(bars) if _direction(bar.name) == direction]
            axes.broken_barh(
                [spans[i] for i in chosen],
                (y - 0.4, 0.8),
                facecolors=[colors[i] for i in chosen],
                edgecolor="white",
                linewidth=0.2,
                hatch=hatch,
            )
    axes.set_yticks(range(len(rows)), [f"{name}: {stream}" for name, stream in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(bar.end_s for bars in timelines.values() for bar in bars) * 1e3)
    axes.spines[["top", "right"]].set_visible(False)
    seen = {_op(bar.name) for bars in timelines.values() for bar in bars}
    patches = [Patch(facecolor=color, label=op) for op, color in _COLORS.items() if op in seen]
    patches += [Patch(facecolor=_OTHER, label="other")] if seen - set(_COLORS) else []
    patches += [Patch(facecolor="white", edgecolor="grey", hatch="///", label="B tasks")]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=7)
    figure.savefig(path)


def _op(name: str) -> str:
    """The op of an action's name; a name that is none stands for itself."""
    parts = name.split(".")
    return parts[1] if _direction(name) else name


def _direction(name: str) -> str:
    head, dot, _ = name.partition(".")
    return head if dot and head in ("F", "B", "W", "G") else ""
