"""Pipeline schedules: they can run, and their bubbles and activations in flight are the published ones."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.pipelines.bubble import bubble, lock_step_bubble
from moe_jax.schedule.pipelines.build import make_table
from moe_jax.schedule.pipelines.dependencies import activation_from, check, gradient_from
from moe_jax.schedule.pipelines.memory import in_flight, slots_of
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick, Table, TableTask

SIZES = [(stages, m) for stages in range(1, 9) for m in sorted({1, 2, stages - 1, stages, 3 * stages, 17} - {0})]
IN_GROUPS = [(stages, stages * groups, chunks) for stages in range(1, 9) for groups in (1, 2, 5) for chunks in (2, 3)]
DOCS = Path(__file__).parents[2] / "docs" / "pipelines.md"
EVERY = [
    *((name, *size, 1) for name in PIPELINE_FACTS if name != "interleaved" for size in SIZES),
    *((name, *size) for name in ("interleaved", "coscheduled", "coscheduled_split") for size in IN_GROUPS),
]
COSTS = [(1.0, 1.0), (1.0, 2.0), (0.7, 1.1)]  # seconds of F and of the whole backward pass


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_and_1f1b_idle_alike_and_differ_in_memory(stages, microbatches):
    """Idle share (S-1)/(M+S-1); GPipe keeps all microbatches, 1F1B as many as there are stages to come."""
    gpipe, one_f_one_b = (make_table(name, stages, microbatches) for name in ("gpipe", "1f1b"))
    for table in (gpipe, one_f_one_b):
        for costs in COSTS:
            assert bubble(table, *costs) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert in_flight(gpipe) == (microbatches,) * stages
    assert in_flight(one_f_one_b) == tuple(min(stages - stage, microbatches) for stage in range(stages))


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), IN_GROUPS)
def test_interleaved_divides_the_bubble_by_its_chunks(stages, microbatches, chunks):
    """Narayanan et al. 2021: (S-1)/(V·M+S-1); Korthikanti et al. 2022, eq. 4: V·S+S-1 chunks on the first stage."""
    table = make_table("interleaved", stages, microbatches, chunks)
    for costs in COSTS:
        assert bubble(table, *costs) == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))
    held = [(chunks + 1) * stages - 1 - 2 * stage for stage in range(stages)]
    assert in_flight(table) == tuple(min(count, chunks * microbatches) for count in held)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zero_bubble_saves_a_weight_gradient_for_each_stage(stages, microbatches):
    """Qi et al. 2023, table 2: (S-1)(T_F+T_B-T_W) against 1F1B's (S-1)(T_F+T_B+T_W), if W is no longer than F or B.

    With fewer microbatches than stages there are fewer W to fill with. Activations are 1F1B's; up to W, its largest.
    """
    table, one_f_one_b = (make_table(name, stages, microbatches) for name in ("zero_bubble", "1f1b"))
    for costs in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.7), (1.2, 1.0, 0.9)):
        forward_s, backward_s, weight_s = costs
        work_s = microbatches * sum(costs)
        filled_s = (min(stages, microbatches) - 1) * weight_s
        idle_s = (stages - 1) * (forward_s + backward_s) - filled_s
        assert bubble(table, *costs) == pytest.approx(idle_s / (work_s + idle_s))
        idle_s = (stages - 1) * sum(costs)
        assert bubble(one_f_one_b, *costs) == pytest.approx(idle_s / (work_s + idle_s))
    assert in_flight(table, until="B") == in_flight(one_f_one_b)
    assert in_flight(table) == (min(stages, microbatches),) * stages


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_weight_gradients_apart_never_make_a_step_longer(stages, microbatches):
    zero_bubble, one_f_one_b = (make_table(name, stages, microbatches) for name in ("zero_bubble", "1f1b"))
    draw = random.Random(stages * 100 + microbatches)
    for _ in range(50):
        costs = [draw.uniform(0, 1) for _ in range(3)]
        assert bubble(zero_bubble, *costs) <= bubble(one_f_one_b, *costs) + 1e-9


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [*((*size, 1) for size in SIZES if size[1] >= 2 * size[0]), *IN_GROUPS]
)
def test_coscheduled_loses_nothing_in_lock_step(stages, microbatches, chunks):
    """The bubble of 1F1B (interleaved, with chunks) even if stages wait for each other, for one more forward pass."""
    table = make_table("coscheduled", stages, microbatches, chunks)
    for costs in COSTS:
        share = (stages - 1) / (chunks * microbatches + stages - 1)
        assert bubble(table, *costs) == pytest.approx(share)
        assert lock_step_bubble(table, *costs) == pytest.approx(share)
    held = [(chunks + 1) * stages - 2 * stage for stage in range(stages)]
    assert in_flight(table) == tuple(min(count, chunks * microbatches) for count in held)
    pairs_S = [sum(None not in slots[s][:2] for slots in table.ticks) for s in range(stages)]
    assert pairs_S[0] == max(chunks * microbatches - held[0] + 1, 0)
    apart_s = chunks * microbatches * 3.0
    together_s = apart_s - 0.5 * sum(pairs_S) / stages
    step_s = apart_s / (1 - bubble(table, 1.0, 2.0))
    hidden_s = step_s - together_s / (1 - bubble(table, 1.0, 2.0, together_s=2.5))
    assert hidden_s >= 0.5 * pairs_S[0] * (1 - 1e-9)


def test_1f1b_loses_in_lock_step_where_passes_differ():
    """Neighbours alternate, so every tick is as long as a backward pass: why `coscheduled` exists even without W."""
    table = make_table("1f1b", 4, 64)
    assert lock_step_bubble(table, 1.0, 1.0) == bubble(table, 1.0, 1.0)
    assert 1 - bubble(table, 1.0, 2.0) > 1.3 * (1 - lock_step_bubble(table, 1.0, 2.0))


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), EVERY)
def test_a_table_runs_with_its_buffers(name, stages, microbatches, chunks):
    """Replayed as the runtime does: arrivals are stored after a tick, and whatever is read is what was meant."""
    table = make_table(name, stages, microbatches, chunks)
    check(table)
    assert Table.parse(str(table)) == table
    slots = slots_of(table)
    assert slots.saved.num_slots == max(in_flight(table))
    memory = [{name: [None] * buffers.num_slots for name, buffers in slots._asdict().items()} for _ in range(stages)]

    def access(kind: str, task: TableTask, write: bool = False) -> None:
        place = getattr(slots, kind).slot[task.stage, task.work]
        if write:
            memory[task.stage][kind][place] = task.work
        assert memory[task.stage][kind][place] == task.work, f"{kind} of {task} is lost"

    for tick in table.ticks:
        tasks = [TableTask(d, stage, work) for stage, slot in enumerate(tick) for d, work in slot.tasks()]
        for task in tasks:
            if task.direction == "F":
                access("saved", task, write=True)
                if activation_from(task, stages):
                    access("activations", task)
            elif task.direction == "B":
                access("saved", task)
                if gradient_from(task, stages, chunks):
                    access("gradients", task)
                if table.split_weight_grad:
                    access("weight", task, write=True)
            else:
                access("saved", task)
                access("weight", task)
        for task in tasks:
            for kind, sender, direction in (("activations", "F", "F"), ("gradients", "B", "B")):
                receiver = _receiver(task, stages, chunks) if task.direction == sender else None
                if receiver:
                    access(kind, receiver._replace(direction=direction), write=True)


def _receiver(task: TableTask, stages: int, chunks: int) -> TableTask | None:
    """Forward: the next of stage 0, 1, …, 0, 1, … of all layer groups; backward: the one before."""
    group = task.work.chunk * stages + task.stage + (1 if task.direction == "F" else -1)
    if not 0 <= group < stages * chunks:
        return None
    return task._replace(stage=group % stages, work=ChunkPass(task.work.microbatch, group // stages))


@pytest.mark.parametrize("name", PIPELINE_FACTS)
def test_received_activations_and_gradients_hardly_wait(name):
    """One buffer for each; only interleaved gradients wait where a stage still fills its next chunk."""
    for stages in range(2, 9):
        slots = slots_of(make_table(name, stages, 3 * stages, 2 if name == "interleaved" else 1))
        activations, gradients = (2, max(2, (stages + 1) // 2)) if name == "interleaved" else (1, 1)
        assert slots.activations.num_slots <= activations
        assert slots.gradients.num_slots <= gradients


def test_a_drawn_table():
    text = str(make_table("zero_bubble", 2, 3))
    assert text == (
        "name: zero_bubble\nstages: 2\nmicrobatches: 3\nchunks: 1\nsplit_weight_grad: true\n\n"
        "stage 0: F0 F1 .  B0 W0 F2 B1 W1 B2 W2\n"
        "stage 1: .  F0 B0 F1 B1 W0 F2 B2 W1 W2\n"
    )
    assert str(StageTick.parse("F3.1+B0")) == "F3.1+B0"
    long = make_table("coscheduled", 8, 64)
    assert max(map(len, str(long).splitlines())) <= 120


def test_drawn_tables_of_the_docs_are_those_that_are_made():
    drawn = [Table.parse(text) for text in re.findall(r"```\n(name: .*?)```", DOCS.read_text(), re.DOTALL)]
    assert [table.name for table in drawn] == ["1f1b", "zero_bubble", "coscheduled"]
    for table in drawn:
        assert table == make_table(table.name, table.stages, table.microbatches, table.chunks)


def test_damage_is_named():
    table = make_table("1f1b", 2, 2)
    idle = (StageTick(), StageTick())
    (first, _), (second, received), *later = table.ticks
    damaged = [
        (
            ((first, received), (second, StageTick()), *later),
            r"F0 of stage 1 .* needs F0 of stage 0, which runs in tick 0",
        ),
        (table.ticks[:-1], r"B1 of stage 0 is missing: add it"),
        ((*table.ticks, table.ticks[-1]), r"B1 of stage 0 runs in tick \d and in tick \d: take one out"),
        (
            (*table.ticks, (StageTick(weight=ChunkPass(0)), StageTick())),
            r"W0 of stage 0 in tick \d is no task .*: take it out",
        ),
        ((table.ticks[1], table.ticks[0], *table.ticks[2:]), r"F0 of stage 1 .* needs F0 of stage 0, which runs"),
        ((*table.ticks[:2], idle[:1], *table.ticks[2:]), r"tick 2 has 1 slots: write one for each of 2 stages"),
    ]
    for ticks, message in damaged:
        with pytest.raises(ScheduleError, match=message):
            check(replace(table, ticks=ticks))
    check(replace(table, ticks=(idle, *table.ticks, idle)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stages: 2", "stages: two", r"'stages: two' .* cannot be read"),
        ("chunks: 1\n", "", r"header of the table has .*: write name, stages, microbatches, chunks"),
        ("F0 F1", "F0 G1", r"'G1' is no slot of a pipeline: write F3"),
        ("F0 F1", "F0+F1", r"'F0\+F1' is no slot"),
        ("stage 1:", "stage 2:", r"'stage 2' is no stage of the table: write stage 0 to stage 1"),
        ("F0 F1", "F0 . F1", r"differ in their number of ticks \(stage 0 has 7, stage 1 has 6\)"),
    ],
)
def test_a_text_that_is_no_table_is_answered(old, new, message):
    text = str(make_table("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match=message):
        Table.parse(text.replace(old, new))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1bb", 2, 2), "pipeline='1f1bb' is unknown: use gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 2), "stages=0 of a pipeline: use at least 1"),
        (("gpipe", 2, 0), "microbatches=0 of a pipeline: use at least 1"),
        (("coscheduled", 2, 2, 0), "chunks=0 of a pipeline: use at least 1"),
        (
            ("1f1b", 2, 2, 2),
            "chunks=2 needs .*: use pipeline=interleaved or coscheduled or coscheduled_split, or chunks=1",
        ),
        (("interleaved", 2, 2), "chunks=1 is too few for pipeline=interleaved: use at least 2, or pipeline=1f1b"),
        (("interleaved", 4, 6, 2), "microbatches=6 cannot go around 4 stages .*: use 4 or 8, or chunks=1"),
        (("coscheduled", 4, 3, 2), "microbatches=3 cannot go around 4 stages .*: use 4, or chunks=1"),
    ],
)
def test_numbers_that_do_not_fit_are_answered(arguments, message):
    with pytest.raises(ScheduleError, match=message) as error:
        make_table(*arguments)
    assert not re.search("\n", str(error.value))
