"""FSMoE's partition of gradients in profiling/: nothing lost or too early, as long as closed forms predict."""

import importlib
from pathlib import Path

import pytest

from moe_jax.schedule.dependencies import check

FOLDER = Path(__file__).parents[1] / "profiling"


@pytest.mark.parametrize(("alpha", "gather", "gradient"), [(0.05, 0.3, 2.0), (0.01, 2.0, 6.0)])
def test_messages_fill_gaps(monkeypatch: pytest.MonkeyPatch, alpha: float, gather: float, gradient: float) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    program = importlib.import_module("gradient_partition")
    case = program.Case(alpha, gather, expert=1.0, dense=1.0, gradient=gradient)
    for way in program.partitioned(case):
        check(way.schedule)
        sent = [0.0] * program.LAYERS
        for task, part in way.sums.items():
            sent[task.block] += part.share
        assert sent == pytest.approx([1.0] * program.LAYERS)
        closed_s = program.fill(case, way.degree, program.both_steps(case, way.degree))[0]
        assert way.seconds(case) == pytest.approx(closed_s)
