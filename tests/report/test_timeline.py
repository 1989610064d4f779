"""Timelines: nothing is lost between a replay or a simulation and what a viewer reads."""

import json
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from moe_jax.errors import UserError
from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import find_target
from moe_jax.report.timeline import Bar, compiled_bars, draw, write_trace
from tests.measure.programs import saved

MEASURED = [Bar("F.attend.0.0", "compute", 0.0, 1e-4), Bar("profiler step", "host", 1e-4, 3e-4)]


def bars() -> list[Bar]:
    return compiled_bars(replay(saved("tpu_v5p.hlo"), find_target("v5p:2x2x2"), 8))


def test_bars_of_a_program_keep_its_times_and_join_neighbours_of_a_task() -> None:
    result = replay(saved("tpu_v5p.hlo"), find_target("v5p:2x2x2"), 8)
    drawn = compiled_bars(result)
    for stream, total in (("compute", result.compute_s), ("communication", result.communication_s)):
        assert sum(bar.end_s - bar.start_s for bar in drawn if bar.stream == stream) == pytest.approx(total)
    compute = [bar for bar in drawn if bar.stream == "compute"]
    assert len(compute) < len(result.compute)
    assert [bar.name for bar in drawn if bar.stream == "communication"][:2] == ["F.dispatch.0.0", "F.dispatch.0.1"]


def test_a_trace_has_a_process_per_timeline_and_a_thread_per_stream_in_microseconds(tmp_path: Path) -> None:
    write_trace({"compiled": bars(), "measured": MEASURED}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {
        (0, None): "compiled",
        (0, 0): "compute",
        (0, 1): "communication",
        (1, None): "measured",
        (1, 0): "compute",
        (1, 1): "host",
    }
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(bars()) + 2
    step_us = {"ts": pytest.approx(100), "dur": pytest.approx(200)}
    assert spans[-1] == {"ph": "X", "name": "profiler step", **step_us, "pid": 1, "tid": 1}


def test_bars_that_overlap_have_threads_of_their_own_in_a_trace(tmp_path: Path) -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.5)]
    write_trace({"measured": [Bar("B.expert.0.0", "compute", *span) for span in spans]}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = [[e["ts"] * 1e-6 for e in events if e["ph"] == "X" and e["tid"] == thread] for thread in range(3)]
    assert rows == [[0.0, 2.0], [1.0], [2.5]]


@pytest.mark.parametrize("scales", [{}, {"measured": 1000.0}])
def test_a_picture_of_any_lanes_is_written(tmp_path: Path, scales: dict[str, float]) -> None:
    draw({"compiled": bars(), "measured": MEASURED}, tmp_path / "timeline.png", "a step", scales)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_shows_what_can_be_seen_and_sums_have_one_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(
        Figure, "legend", lambda self, handles, **_: labels.extend(each.get_label() for each in handles)
    )
    names = ("G.reduce.0.0", "G.embed.0", "G.head.0", "B.attend.0.0")
    drawn = [Bar(name, "compute", float(i), i + 1.0) for i, name in enumerate(names)]
    draw({"predicted": [*drawn, Bar("G.counts.0", "compute", 4.0, 4.0001)]}, tmp_path / "timeline.png", "a step")
    assert labels == ["attend", "sums of gradients", "backward"]


def test_a_picture_without_matplotlib_is_answered_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[plots\]'"):
        draw({"measured": MEASURED}, tmp_path / "timeline.png", "a step")
