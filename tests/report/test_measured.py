"""Measured lanes: one device's operations under the names of the schedule, and the variant that they are of."""

import dataclasses
import json
from pathlib import Path

import pytest

from moe_jax.errors import UserError
from moe_jax.measure.overlap import replay
from moe_jax.measure.trace import TracedOperation, TraceError, of_one_device
from moe_jax.report.compiled import Compiled, variants_of
from moe_jax.report.measured import (
    Traced,
    TracedStep,
    _longest_compute,
    _mesh_of_run,
    _most_exposed,
    _steps,
    describe_measured,
    measure,
    variant_of,
)
from moe_jax.report.timeline import Bar, measured_bars
from moe_jax.schedule.actions import Action
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import Parts, StepShape
from tests.measure.programs import BODY, TOY, program, work
from tests.report.test_compiled import outcome


def ran(
    task: str, start_s: float, end_s: float, name: str = "fusion.1", device: str = "0", run: int = 0
) -> TracedOperation:
    return TracedOperation(name, task, name.startswith("all-"), "thread", start_s, end_s, device, run)


STEP = [
    ran("F.attend.0.0", 1.0, 2.0),
    ran("F.attend.0.0", 2.0005, 3.0),
    ran("F.dispatch.0.0", 3.0, 5.0, "all-to-all.3"),
    ran("F.attend.0.0", 4.0, 4.5),
    ran("", 4.5, 5.0),
    ran("", 5.0, 6.0, "all-reduce.12"),
]


def test_operations_of_a_task_are_one_bar_unless_a_picture_shows_their_gap() -> None:
    assert measured_bars(STEP) == [
        Bar("F.attend.0.0", "compute", 0.0, 2.0),
        Bar("F.attend.0.0", "compute", 3.0, 3.5),
        Bar("other", "compute", 3.5, 4.0),
        Bar("F.dispatch.0.0", "communication", 2.0, 4.0),
        Bar("all-reduce", "communication", 4.0, 5.0),
    ]


def test_a_measured_step_is_reported_with_the_estimated_one() -> None:
    estimated = replay(program(work("a", 2_500_000), BODY), TOY, 1)
    compiled = Compiled(variant="unified", outcome=outcome(), replay=estimated, match=None, predicted=None)
    assert describe_measured(TracedStep(Path("trace/0"), compiled, STEP, 8, None)).splitlines() == [
        "── unified, measured: device 0 of trace/0",
        "measured step    5000.0 ms, 2 × the estimated one",
        "compute          2999.5 ms",
        "communication    3000.0 ms, of which hidden 1000.0",
        "idle             0.500 ms",
        "longest compute  F.attend.0.0 2499.5 ms, other 500.0 ms",
        "most exposed     F.dispatch.0.0 1000.0 ms, all-reduce 1000.0 ms",
    ]


@pytest.mark.parametrize(
    ("num_devices", "mesh", "reported"),
    [
        (8, {"data": 2, "expert": 4}, None),
        (8, None, None),
        (8, {"data": 1, "expert": 8}, "the trace is of 8 devices (expert=8), and the compiled step of 8 devices "),
        (2, None, "the trace is of 2 devices, and the compiled step of 8 devices (data=2 × expert=4): "),
    ],
)
def test_a_trace_on_another_mesh_is_reported(
    num_devices: int, mesh: dict[str, int] | None, reported: str | None
) -> None:
    estimated = replay(program(work("a", 2_500_000), BODY), TOY, 1)
    compiled = Compiled(variant="unified", outcome=outcome(), replay=estimated, match=None, predicted=None)
    output = describe_measured(TracedStep(Path("trace/0"), compiled, STEP, num_devices, mesh))
    assert ("another mesh" in output) == (reported is not None)
    assert (reported or "measured") in output


def test_the_most_exposed_tasks_are_those_with_the_longest_communication_alone() -> None:
    """The sixth of six tasks is left out, and so is a task whose communication is hidden."""
    alone = [ran(f"F.dispatch.{i}.0", 10.0 * i, 10.0 * i + 6 - i, "all-to-all.3") for i in range(6)]
    hidden = [ran("F.combine.0.0", 70.0, 71.0, "all-to-all.4"), ran("F.expert.0.0", 69.0, 72.0)]
    assert _most_exposed([*alone, *hidden]) == ", ".join(f"F.dispatch.{i}.0 {6 - i}000.0 ms" for i in range(5))
    assert _most_exposed(hidden) == "none"
    half = [ran("B.combine.0.0", 0.0, 2.0, "all-to-all.5"), ran("B.expert.0.0", 1.5, 3.0)]
    assert _most_exposed(half) == "B.combine.0.0 1500.0 ms"
    plain = [ran("F", 0.0, 2.0, "all-to-all.5"), ran("B", 3.0, 4.0, "all-to-all.6")]
    assert _most_exposed(plain) == "forward all-to-all 2000.0 ms, backward all-to-all 1000.0 ms"


def test_operations_of_a_plain_step_have_the_names_of_its_parts() -> None:
    step = [
        ran("F", 0.0, 2.0)._replace(part="attention"),
        ran("F", 2.0, 3.0, "all-to-all.5")._replace(part="dispatch"),
        ran("B", 3.0, 4.0, "all-gather.6")._replace(part="attention"),
        ran("B", 4.0, 5.5)._replace(part="experts"),
        ran("", 5.5, 6.0)._replace(part="optimizer"),
        ran("F", 6.0, 6.25),
    ]
    assert _longest_compute(step) == (
        "forward attention 2000.0 ms, backward experts 1500.0 ms, optimizer 500.0 ms, forward other 250.0 ms"
    )
    assert _most_exposed(step) == "forward dispatch 1000.0 ms, backward attention all-gather 1000.0 ms"


def test_the_step_time_of_the_run_is_reported_with_the_traced_one(tmp_path: Path) -> None:
    estimated = replay(program(work("a", 2_500_000), BODY), TOY, 1)
    compiled = Compiled(variant="unified", outcome=outcome(), replay=estimated, match=None, predicted=None)
    step = TracedStep(tmp_path / "trace" / "0", compiled, STEP, 8, None)
    assert "other steps" not in describe_measured(step)
    lines = [json.dumps({"step": n, "step_s": step_s}) for n, step_s in enumerate((0.5, 0.25, 0.125))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "other steps      250.0 ms, the median of the run's records\n" in describe_measured(step)


def test_the_mesh_of_a_trace_is_that_of_its_run_if_it_has_as_many_devices(tmp_path: Path) -> None:
    assert _mesh_of_run(tmp_path / "trace" / "0", 8) is None
    (tmp_path / "provenance.json").write_text('{"mesh": {"data": 2, "expert": 4}}')
    assert _mesh_of_run(tmp_path / "trace" / "0", 8) == {"data": 2, "expert": 4}
    assert _mesh_of_run(tmp_path / "trace" / "0", 4) is None
    (tmp_path / "provenance.json").write_text("[]")
    assert _mesh_of_run(tmp_path / "trace" / "0", 8) is None


def loop(name: str, scopes: list[str]) -> tuple[str, str]:
    """A loop of three turns, and its body of an instruction in each scope."""
    lines = [f'  %{name}.{i} = f32[] constant(0), metadata={{op_name="{scope}"}}' for i, scope in enumerate(scopes)]
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    body = f"%{name}.body () -> f32[] {{\n{chr(10).join(lines)}\n}}\n"
    return f"%{name} = f32[] while(), condition=%more, body=%{name}.body, {trips}", body


def test_turns_of_loops_have_the_names_of_their_blocks_and_other_devices_are_left_out() -> None:
    """Two blocks in each turn; the loop inside a task has turns of its own."""
    up, up_body = loop("up", ["F.attend.0.0", "F.attend.1.0"])
    down, down_body = loop("down", ["B.attend.1.0", "B.attend.0.0"])
    names = [f"F.attend.{block}.0" for block in range(6)] + [f"B.attend.{block}.0" for block in reversed(range(6))]
    schedule = Schedule("unified", StepShape(kinds=("moe",) * 6, forward=Parts(1, 1)), tuple(map(Action.parse, names)))
    turns = [("up", turn, i, f"F.attend.{i}.0") for turn in range(3) for i in (0, 1)]
    turns += [("down", turn, i, f"B.attend.{1 - i}.0") for turn in range(3) for i in (0, 1)]
    operations = [
        ran(task, at, at + 1, f"{name}.{i}", device, run)
        for device in "01"
        for at, (name, run, i, task) in enumerate(turns)
    ]
    operations = sorted([ran("", 0, 6, "up"), *operations], key=lambda operation: operation.start_s)
    named = of_one_device(operations, program(f"{up}\n{down}", up_body + down_body), schedule)
    assert [operation.task for operation in named] == names


def test_a_trace_of_another_schedule_is_refused() -> None:
    strange = [*STEP, ran("F.attend.7.0", 6.0, 7.0)]
    estimated = replay(program(work("a", 2_500_000), BODY), TOY, 1)
    names = tuple(map(Action.parse, ("F.attend.0.0", "F.dispatch.0.0")))
    schedule = Schedule("unified", StepShape(kinds=("moe",), forward=Parts(1, 1)), names)
    done = dataclasses.replace(outcome(), schedule=str(schedule))
    compiled = Compiled(variant="unified", outcome=done, replay=estimated, match=None, predicted=None)
    line = program(work("a", 2_500_000), BODY)
    assert len(measure(Traced(Path("trace/0"), line, STEP, 8, None), compiled).operations) == len(STEP)
    with pytest.raises(TraceError, match=r"^--trace trace/0 has tasks that .* lacks, such as F\.attend\.7\.0: name"):
        measure(Traced(Path("trace/0"), line, strange, 8, None), compiled)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text("schedule: {policy: unified, microbatches: 2}\n")
    return str(path)


def chosen(config: str, policies: str | None, *overrides: str) -> str:
    return variant_of(config, overrides, variants_of(policies, overrides))


def test_a_trace_is_of_the_variant_that_the_config_itself_is(config: str) -> None:
    assert chosen(config, None) == "step"
    assert chosen(config, "vanilla,unified") == "unified"
    ring = "unified+exchange.algorithm=ring"
    assert chosen(config, f"unified,{ring}", "exchange.algorithm=ring") == "unified"
    assert chosen(config, f"{ring},unified") == "unified"
    assert chosen(config, ring) == ring


def test_a_trace_of_a_plain_step_is_of_a_plain_variant(config: str) -> None:
    plain = ["schedule.policy=vanilla", "schedule.microbatches=1"]
    assert variant_of(config, plain, variants_of("unified,vanilla", plain), has_tasks=False) == "vanilla"
    with pytest.raises(
        UserError, match=r"is of a plain step, and --config .* orders tasks \(schedule.policy=unified\)"
    ):
        variant_of(config, [], variants_of(None, []), has_tasks=False)


def test_a_trace_of_none_of_the_variants_is_refused(config: str) -> None:
    with pytest.raises(
        UserError, match=r"^--policies vanilla lacks schedule.policy=unified of the traced run: add it$"
    ):
        chosen(config, "vanilla")
    with pytest.raises(UserError, match=r"schedules nothing \(schedule.policy=vanilla\): name the config of the run"):
        chosen(config, None, "schedule.policy=vanilla", "schedule.microbatches=1")


def test_steps_of_a_trace_are_counted_by_most_of_its_instructions() -> None:
    line = program("\n".join(work(name, 1) for name in ("a", "b", "c")), BODY)
    once = [ran("", 0.0, 1.0, name) for name in ("a", "b", "c", "a")]  # which takes two events
    assert _steps(line, []) == 1
    assert _steps(line, once) == 1
    assert _steps(line, 2 * once) == 2
