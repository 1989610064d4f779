"""A trace of a real program: what is read must be what ran."""

import gzip
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moe_jax.measure import trace
from moe_jax.measure.hlo import parse
from moe_jax.measure.trace import TracedOperation, joined, read_trace, seconds_by_op
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from tests.parallel.per_device import on_mesh


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    def body(x):
        with jax.named_scope("F.nonsense.1.0"), jax.named_scope("F.expert.3.0"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("G.reduce.3.1"):
            total = jax.lax.psum(x, BATCH_AXES)
        with jax.named_scope("B.expert.3.0"):
            return total @ total

    x = jnp.ones((8 * 128, 128))
    program = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4).lower(x).compile()
    jax.block_until_ready(program(x))
    folder = tmp_path_factory.mktemp("trace")
    with jax.profiler.trace(folder):
        jax.block_until_ready(program(x))
    return read_trace(folder, program.as_text())


def test_operations_carry_the_task_they_were_traced_under(operations):
    assert {operation.task for operation in operations} >= {"F.expert.3.0", "G.reduce.3.1", "B.expert.3.0"}


def test_collectives_are_distinguished_from_computations(operations):
    by_task = {operation.task: operation.communicates for operation in operations if operation.task}
    assert by_task == {"F.expert.3.0": False, "G.reduce.3.1": True, "B.expert.3.0": False}


def test_every_device_ran_its_tasks_in_order(operations):
    """All eight ran the sum, and none of the products after it began before the first sum ended."""
    sums = [operation for operation in operations if operation.communicates]
    later = [operation for operation in operations if operation.task == "B.expert.3.0"]
    assert len(sums) == 8
    assert min(operation.start_s for operation in later) >= min(operation.end_s for operation in sums)


def test_operations_know_their_device_and_how_often_it_ran_them(operations):
    sums = [operation for operation in operations if operation.communicates]
    assert sorted((operation.device, operation.run) for operation in sums) == [(str(device), 0) for device in range(8)]


def test_other_programs_in_a_trace_are_left_out(tmp_path):
    one, other = (jax.jit(function).lower(1.0).compile() for function in (jnp.sin, jnp.cos))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready([one(1.0), other(1.0), other(2.0)])
    assert len(read_trace(tmp_path, one.as_text())) == 1
    assert [operation.run for operation in read_trace(tmp_path, other.as_text())] == [0, 1]


def test_operations_of_tpus_have_their_names_in_one_thread_and_their_program_in_another(tmp_path):
    """As other projects read such traces; none of a real TPU was at hand."""
    program = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((8, 8))).compile().as_text()
    hlo = parse(program)
    name = next(line.name for line in hlo.computations[hlo.entry] if "tanh" in line.op_name)

    def span(thread: int, text: str, start: float) -> dict[str, Any]:
        return {"ph": "X", "pid": 3, "tid": thread, "name": text, "ts": start, "dur": 10.0, "args": {"tf_op": "x"}}

    def called(kind: str, text: str, **thread: int) -> dict[str, Any]:
        return {"ph": "M", "pid": 3, "name": kind, "args": {"name": text}, **thread}

    events = [
        called("process_name", "/device:TPU:1 (pid 3)"),
        called("thread_name", "XLA Modules", tid=1),
        called("thread_name", "XLA Ops", tid=2),
        span(1, f"{hlo.name}(1234)", 100.0),
        span(1, "jit_other(5678)", 200.0),
        span(2, name, 104.0),
        span(2, "an operation of libtpu", 101.0),
        span(2, name, 204.0),
    ]
    with gzip.open(tmp_path / "t.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    (found,) = read_trace(tmp_path, program)
    assert (found.name, found.device, found.thread, found.run) == (name, "/device:TPU:1 (pid 3)", "XLA Ops", 0)


def test_times_are_seconds_since_the_first_operation(operations):
    assert operations[0].start_s == 0
    assert all(0 <= operation.start_s <= operation.end_s < 10 for operation in operations)
    assert [operation.start_s for operation in operations] == sorted(operation.start_s for operation in operations)


def test_a_collective_in_the_background_belongs_to_the_task_that_started_it(tmp_path):
    def body(x):
        with jax.named_scope("F.dispatch.3.0"):
            under_way = EXCHANGES["background"].start(x, Ranks(Axis.EXPERT, "cpu"))
        with jax.named_scope("F.expert.3.0"):
            return EXCHANGES["background"].finish(under_way, Ranks(Axis.EXPERT, "cpu")) + 1

    x = jnp.ones((8 * 4, 1000))
    program = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4).lower(x).compile()
    jax.block_until_ready(program(x))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(program(x))
    operations = read_trace(tmp_path, program.as_text())
    arrived = [operation.task for operation in operations if operation.communicates]
    assert arrived == ["F.dispatch.3.0"] * 8 * 3  # at 8 devices from 3 others
    assert not any("finish" in operation.name for operation in operations)


def test_a_folder_without_a_trace_has_no_operations(tmp_path):
    assert read_trace(tmp_path, "") == []


def test_without_a_schedule_forward_and_backward_are_distinguished(tmp_path):
    def loss(x):
        return jnp.sum(jnp.tanh(x @ x) @ x)

    x = jnp.ones((256, 256))
    program = jax.jit(jax.grad(loss)).lower(x).compile()
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(program(x))
    tasks = [operation.task for operation in read_trace(tmp_path, program.as_text())]
    assert {"F", "B"} <= set(tasks)
    assert tasks.index("F") < tasks.index("B")


def test_compute_is_summed_by_op_and_direction_and_collectives_are_not():
    def ran(task, start_s, end_s, communicates=False):
        return TracedOperation("dot", task, communicates, "thread", start_s, end_s)

    operations = [
        ran("F.expert.0.0", 0.0, 1.0),
        ran("F.expert.0.0", 0.5, 2.0),  # on another thread
        ran("F.expert.0.1", 0.5, 1.0),
        ran("W.expert.0.1", 3.0, 4.0),
        ran("F.attend.0.0", 2.0, 2.5),
        ran("F.attend.1.0", 2.5, 2.75),
        ran("F.dispatch.0.0", 0.0, 9.0, communicates=True),
        ran("G.reduce.0.0", 4.0, 5.0),
        ran("", 5.0, 6.0),
        ran("B", 6.0, 7.0),
    ]
    assert seconds_by_op(operations, ["moe", "dense"]) == {
        "expert": {"F": 2.5, "B": 0.0, "W": 1.0},
        "attend": {"F": 0.5, "B": 0.0, "W": 0.0},
        "dense": {"F": 0.25, "B": 0.0, "W": 0.0},
    }


def test_spans_that_touch_are_joined():
    assert joined([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]


@pytest.mark.parametrize(("limit", "found"), [("constant(3)", (3,)), ("parameter(1)", ())])
def test_tasks_of_a_loop_are_numbered_if_its_iterations_are_known(limit, found):
    """Otherwise they keep their names: an unknown number is not one iteration, whose tasks would seem to be all."""
    program = parse(
        f"""HloModule toy, is_scheduled=true

%body (p: u8[4]) -> u8[4] {{
  %p = u8[4] parameter(0)
  %a = u8[4] negate(%p), metadata={{op_name="jit(step)/F.attend.0.0/neg"}}
  ROOT %b = u8[4] negate(%a), metadata={{op_name="jit(step)/F.expert.0.0/neg"}}
}}

%cond (q: u8[4]) -> pred[] {{
  %q = u8[4] parameter(0)
  %n = s32[] {limit}
  ROOT %less = pred[] compare(%q, %n), direction=LT
}}

ENTRY %main (x: u8[4]) -> u8[4] {{
  %y = u8[4] parameter(0)
  ROOT %w = u8[4] while(%y), condition=%cond, body=%body
}}
"""
    )
    iterations = dict(trace._loop_iterations(program, program.computations[program.entry], ()))
    assert iterations["a"] == iterations["b"] == found
