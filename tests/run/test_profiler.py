"""Which steps a run traces, and what is left of them when one fails."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config import Config, LogConfig, TrainConfig
from moe_jax.run.profiler import Tracing, steps_to_trace

METER: Any = SimpleNamespace(paused=nullcontext)
LOG: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("wanted", "first_step", "expected"),
    [
        ((5,), 0, [5]),
        ((5,), 3, [5]),
        ((5,), 4, [6]),  # the fifth would be the first of its process
        ((5,), 5, []),  # done before
        ((3, 5), 0, [3, 4, 5]),
        ((3, 5), 2, [4, 5, 6]),
        ((3, 5), 4, [6]),  # as many as are left, of those that an earlier start did not end with
        ((3, 5), 5, []),
    ],
)
def test_the_first_step_of_a_process_is_not_traced(wanted, first_step, expected):
    config = Config(train=TrainConfig(steps=6), log=LogConfig(trace_step=wanted))
    assert list(steps_to_trace(config, first_step)) == expected


def test_no_step_is_traced_unasked_or_after_the_last():
    assert not steps_to_trace(Config(), 0)
    assert not steps_to_trace(Config(train=TrainConfig(steps=5), log=LogConfig(trace_step=(5,))), 4)


def test_a_trace_that_cannot_be_written_costs_only_itself(tmp_path, monkeypatch):
    """No folder at first; then the profiler writes nothing, as on a full disk, and still ends."""
    program, warnings = jax.jit(lambda x: x + 1).lower(1).compile(), []
    log: Any = SimpleNamespace(warn=warnings.append)

    def run() -> None:
        with Tracing(range(1, 2), tmp_path, log) as tracing:
            tracing.begin(1, METER)
            tracing.end(1, program, METER)

    (tmp_path / "trace").write_text("")
    run()
    (tmp_path / "trace").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(jax.profiler, "stop_trace", _without_room)
        run()
    assert [text.partition("(")[2] for text in warnings] == [
        f"[Errno 20] Not a directory: '{tmp_path}/trace/0.part')",
        "RESOURCE_EXHAUSTED: No space left on device)",
    ]
    run()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["0"]
    assert len(warnings) == 2


def _without_room() -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: No space left on device")


def test_a_trace_replaces_the_one_before_and_a_step_that_fails_leaves_that_one(tmp_path):
    program = jax.jit(lambda state, batch: state + batch).lower(1, 2).compile()

    def run(steps: range, last: int) -> None:
        with Tracing(steps, tmp_path, LOG) as tracing:
            for step in range(1, last + 1):
                tracing.begin(step, METER)
                jax.block_until_ready(program(jnp.int32(1), jnp.int32(2)))
                if step == 4:
                    raise RuntimeError("out of memory")
                tracing.end(step, program, METER)

    run(range(2, 3), last=3)
    first = sorted((tmp_path / "trace" / "0").rglob("*"))
    assert {"step.hlo", "plugins"} <= {path.name for path in first}
    with pytest.raises(RuntimeError, match="out of memory"):
        run(range(3, 6), last=5)
    run(range(2, 4), last=2)  # ended early
    assert sorted((tmp_path / "trace").rglob("*")) == sorted([tmp_path / "trace" / "0", *first])
    run(range(2, 4), last=3)
    assert len(list((tmp_path / "trace").rglob("*.trace.json.gz"))) == 1
    run(range(0), last=1)
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["0"]
