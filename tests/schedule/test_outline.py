"""Outlines of tables: long tables repeat what shorter ones do, exactly."""

from collections import Counter

import pytest

from moe_jax.schedule.pipelines.build import make_table
from moe_jax.schedule.pipelines.memory import slots_of
from moe_jax.schedule.pipelines.outline import outline_of, tick_slots

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("coscheduled", 1),
    ("coscheduled", 2),
    ("interleaved", 2),
    ("coscheduled_split", 2),
]


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_outlines_count_the_ticks_and_slots_of_the_whole_table(name: str, chunks: int, stages: int) -> None:
    for microbatches in (2 * stages, 8 * stages, *((9 * stages - 1, 7 * stages + 1) if chunks == 1 else ())):
        found, table = outline_of(name, stages, microbatches, chunks), make_table(name, stages, microbatches, chunks)
        runs = [tuple(tuple(work.chunk if work else None for work in slot) for slot in slots) for slots in table.ticks]
        assert {tick: count for tick, count in found.ticks.items() if count} == Counter(runs)
        assert found[2:] == tuple(buffers.num_slots for buffers in slots_of(table))
        assert found.has_pairs == table.has_pairs
        slots, index_TS = tick_slots(name, stages, microbatches, chunks)
        assert [tuple(slots[index] for index in row) for row in index_TS] == [
            tuple(enumerate(tick)) for tick in found.ticks
        ]
