"""Pipeline schedules: they can run, and their bubbles and activations in flight are the published ones."""

import pytest

from moe_jax.schedule.pipelines.bubble import bubble
from moe_jax.schedule.pipelines.build import make_table
from moe_jax.schedule.pipelines.dependencies import check
from moe_jax.schedule.pipelines.memory import in_flight
from moe_jax.schedule.pipelines.table import Table

SIZES = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, stages, 3 * stages, 17)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_and_1f1b_idle_alike_and_differ_in_memory(stages, microbatches):
    """Idle share (S-1)/(M+S-1); GPipe keeps all microbatches, 1F1B as many as there are stages to come."""
    gpipe, one_f_one_b = (make_table(name, stages, microbatches) for name in ("gpipe", "1f1b"))
    for table in (gpipe, one_f_one_b):
        check(table)
        assert Table.parse(str(table)) == table
        assert bubble(table, 1.0, 2.0) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert in_flight(gpipe) == (microbatches,) * stages
    assert in_flight(one_f_one_b) == tuple(min(stages - stage, microbatches) for stage in range(stages))
