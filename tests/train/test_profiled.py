"""Which step a run traces, and what is left of it when it fails."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config import Config, Log, Train
from moe_jax.train.profiled import step_to_trace, traced


@pytest.mark.parametrize(
    ("first_step", "expected"),
    [
        (0, 5),
        (3, 5),
        (4, 6),  # the fifth would be the first of its process
        (5, None),  # done before
    ],
)
def test_the_first_step_of_a_process_is_not_traced(first_step, expected):
    config = Config(train=Train(steps=6), log=Log(trace_step=5))
    assert step_to_trace(config, first_step) == expected


def test_no_step_is_traced_unasked_or_behind_the_last():
    assert step_to_trace(Config(), 0) is None
    assert step_to_trace(Config(train=Train(steps=5), log=Log(trace_step=5)), 4) is None


def test_a_trace_replaces_the_one_before_and_a_step_that_fails_leaves_that_one(tmp_path):
    program = jax.jit(lambda state, batch: (state + batch, {})).lower(1, 2).compile()
    assert traced(program, 1, [2], tmp_path) == (3, {})
    first = sorted((tmp_path / "trace" / "0").rglob("*"))
    assert {"step.hlo", "plugins"} <= {path.name for path in first}

    def fails(state, batch):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        traced(fails, 1, [2], tmp_path)
    assert sorted((tmp_path / "trace").rglob("*")) == sorted([tmp_path / "trace" / "0", *first])
    assert traced(program, jnp.int32(3), [4], tmp_path)[0] == 7
    assert len(list((tmp_path / "trace").rglob("*.trace.json.gz"))) == 1
