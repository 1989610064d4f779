"""The replay: closed-form cases, and invariants on real programs."""

import dataclasses
import itertools

import pytest

from moe_jax.measure.overlap import Replay, replay
from moe_jax.measure.targets import find_target
from tests.measure.programs import BODY, TOY, done, operand, program, saved, start, work


def run(*lines: str, others: str = "") -> Replay:
    return replay(program("\n".join([operand(10), operand(40), *lines]), BODY + others), TOY, 2)


def us(*seconds: float) -> list[float]:
    return [pytest.approx(1e6 * value, abs=1e-6) for value in seconds]


@pytest.mark.parametrize(("concurrent", "exposed"), [(0, 40), (15, 25), (40, 0), (60, 0)])
def test_a_transfer_is_exposed_as_far_as_compute_concurrent_with_it_is_too_short(concurrent: int, exposed: int) -> None:
    result = run(
        work("a", 5), start("s", 40), *([work("b", concurrent)] if concurrent else []), done("s"), work("c", 7)
    )
    assert us(result.exposed_s, result.hidden_s) == [exposed, 40 - exposed]
    assert us(result.step_s) == [5 + max(40, concurrent) + 7]
    assert us(result.collectives[0].inside_s) == [concurrent]


def test_compute_after_the_done_hides_nothing() -> None:
    result = run(start("s", 40), done("s"), work("b", 100))
    assert us(result.exposed_s, result.step_s) == [40, 140]


def test_transfers_run_one_after_another() -> None:
    result = run(start("s", 40), start("t", 10), work("a", 30), done("t"), work("b", 1), done("s"))
    assert [us(each.start_s, each.end_s) for each in result.collectives] == [[0, 40], [40, 50]]
    assert us(*(each.exposed_s for each in result.collectives)) == [0, 20]
    assert us(result.step_s) == [51]


def test_links_inside_and_between_nodes_are_taken_for_what_goes_over_them() -> None:
    """For an exchange of four ranks, 10 µs inside its node and 200 µs between nodes."""

    def permute(name: str, pairs: str) -> str:
        return f"%{name} = (u8[10], u8[10]) collective-permute-start(%x10), source_target_pairs={pairs}"

    lines = [operand(10), operand(40), "%a = (u8[40], u8[40]) all-to-all-start(%x40), replica_groups={{0,1,2,3}}"]
    lines += [permute("i", "{{0,1},{2,3}}"), permute("b", "{{0,2},{1,3}}"), done("i"), done("b"), done("a")]
    nodes_of_two = dataclasses.replace(TOY, node_devices=2)
    result = replay(program("\n".join(lines)), nodes_of_two, 4)
    assert [us(each.start_s, each.end_s) for each in result.collectives] == [[0, 200], [10, 20], [200, 300]]


def test_a_collective_without_start_and_done_stops_compute_and_waits_for_the_link() -> None:
    sync = "%c = u8[10] collective-permute(%x10), source_target_pairs={{0,1},{1,0}}"
    result = run(start("s", 40), work("a", 15), sync, work("b", 3), done("s"))
    assert [each.is_async for each in result.collectives] == [True, False]
    assert us(result.exposed_s, result.step_s) == [25 + 10, 15 + 35 + 3]


def test_a_start_that_the_gpu_runs_in_one_go_is_synchronous() -> None:
    line = start("s", 40) + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    result = run(line, work("a", 60), done("s"))
    assert not result.collectives[0].is_async
    assert us(result.exposed_s, result.step_s) == [40, 100]


def test_collectives_after_generic_starts_and_updates_are_seen() -> None:
    wrapped = """%wrapped () -> u8[40] {
  %p = u8[40] parameter(0)
  ROOT %inner = u8[40] collective-permute(%p), source_target_pairs={{0,1},{1,0}}, metadata={op_name="s/F.combine.0.0/p"}
}
"""
    result = run(
        "%s = ((u8[40]), u8[40]) async-start(%x40), calls=%wrapped",
        work("a", 10),
        "%u = ((u8[40]), u8[40]) async-update(%s)",
        work("b", 10),
        "%d = u8[40] async-done(%u)",
        others=wrapped,
    )
    (transfer,) = result.collectives
    assert (transfer.kind, transfer.is_async, transfer.op_name) == ("collective-permute", True, "s/F.combine.0.0/p")
    assert us(transfer.inside_s, transfer.exposed_s) == [20, 20]


def test_a_collective_split_into_parts_of_fusions_is_in_flight_from_its_start_to_its_done() -> None:
    """As on TPUs without a SparseCore: parts are fusions, of which the steps compute something else."""
    reduced = (
        '%{0}.r = u8[40] all-reduce(%{0}.p), channel_id=3, replica_groups={{0,1}}, frontend_attributes={chain_id="0"}'
    )
    ends = {"s": 'custom_call_target="AsyncCollectiveStart"', "d": 'custom_call_target="AsyncCollectiveDone"'}

    def part(name: str, *more: str) -> str:
        lines = [f"%{name}.p = u8[40] parameter(0)", reduced.replace("{0}", name), *more]
        return f"%{name}.body () -> u8[40] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"

    others = part("s", f"%s.c = u8[40] custom-call(%s.r), {ends['s']}") + part(
        "d", f"%d.c = u8[40] custom-call(%d.r), {ends['d']}"
    )
    others += part("t", "%t.a = f32[4,4] parameter(1)", "%t.d = f32[4,4] dot(%t.a, %t.a), lhs_contracting_dims={1}")

    def fusion(name: str, cycles: int) -> str:
        cost = f'backend_config={{"estimated_cycles":"{cycles}"}}'
        return f"%{name} = u8[40] fusion(%x40), kind=kCustom, calls=%{name}.body, {cost}"

    result = run(work("a", 5), fusion("s", 0), fusion("t", 30), work("b", 2), fusion("d", 0), others=others)
    (transfer,) = result.collectives
    assert (transfer.kind, transfer.is_async, transfer.inside_products) == ("all-reduce", True, 1)
    assert us(transfer.seconds, transfer.inside_s, transfer.exposed_s) == [40, 32, 8]
    assert us(result.step_s, result.compute_s) == [45, 37]


def loop(turns: int, *body: str) -> tuple[str, str]:
    """A loop's line and its computations."""
    inside = "\n".join(f"  {line}" for line in body)
    computations = (
        f"%turn () -> s32[] {{\n  {operand(10)}\n{inside}\n}}\n"
        "%ends () -> pred[] {\n  %i = s32[] parameter(0)\n"
        f"  %limit = s32[] constant({turns})\n  ROOT %more = pred[] compare(%i, %limit), direction=LT\n}}\n"
    )
    return "%loop = s32[] while(%x10), condition=%ends, body=%turn", computations


def test_a_loop_is_walked_turn_by_turn_and_hides_within_each() -> None:
    line, others = loop(4, start("s", 10), work("b", 6), done("s"))
    result = run(line, work("after", 1), others=others)
    assert len(result.collectives) == 4
    assert [each.iteration for each in result.collectives] == [0, 1, 2, 3]
    assert us(result.exposed_s, result.step_s) == [4 * 4, 4 * 10 + 1]
    assert result.unknown_loops == ()


def test_a_loop_of_compute_alone_is_one_task() -> None:
    line, others = loop(1000, work("b", 6))
    result = run(line, others=others)
    assert len(result.compute) == 1
    assert us(result.step_s) == [6000]


def test_the_cheaper_branch_runs() -> None:
    branches = "".join(
        f"%{name} () -> f32[2] {{\n  {work(f'w{name}', cycles)}\n}}\n" for name, cycles in (("p", 9), ("q", 2))
    )
    result = run("%c = f32[2] conditional(%x10), branch_computations={%p, %q}", others=branches)
    assert us(result.step_s) == [2]


def test_a_loop_for_rows_that_overflow_takes_no_turn() -> None:
    line, others = loop(1, work("b", 6))
    result = run(line + ', metadata={op_name="step/W.expert.0.0/overflow/while"}', work("after", 1), others=others)
    assert us(result.step_s) == [1]
    assert result.unknown_loops == ()


def rows_loop(name: str, scopes: str, *body: str) -> tuple[str, str]:
    """A loop whose limit is computed, in scopes, and its computations."""
    inside = "\n".join(f"  {line}" for line in body)
    others = (
        f"%{name}.turn () -> s32[] {{\n{inside}\n}}\n%{name}.ends () -> pred[] {{\n  %{name}.i = s32[] parameter(0)\n"
        f"  ROOT %{name}.more = pred[] compare(%{name}.i, %{name}.i), direction=LT\n}}\n"
    )
    scope = f'metadata={{op_name="jit(step)/F.expert.0.0/{scopes}/while"}}'
    return f"%{name} = s32[] while(%x10), condition=%{name}.ends, body=%{name}.turn, {scope}", others


def test_a_loop_over_rows_runs_as_often_as_balanced_routing_needs() -> None:
    line, others = rows_loop("tiles", "filled_25_percent/at_most_12", work("b", 6))
    result = run(line, work("after", 1), others=others)
    assert us(result.step_s) == [3 * 6 + 1]
    assert (result.balanced_loops, result.unknown_loops) == (("tiles",), ())


def test_a_loop_over_rows_with_less_than_a_turn_takes_one() -> None:
    line, others = rows_loop("tiles", "filled_25_percent/at_most_2", work("b", 6))
    assert us(run(line, others=others).step_s) == [6]


def test_loops_of_unknown_length_are_reported_wherever_they_are() -> None:
    """In another loop, too; but not those of a branch that does not run."""
    inner, inner_body = rows_loop("inner", "anything", work("b", 6))
    other, other_body = rows_loop("other", "anything", work("c", 60))
    outer, outer_body = loop(4, inner)
    branches = f"%p () -> f32[2] {{\n  {work('d', 1)}\n}}\n%q () -> f32[2] {{\n  {other}\n}}\n"
    branch = "%c = f32[2] conditional(%x10), branch_computations={%p, %q}"
    result = run(outer, branch, others=inner_body + other_body + outer_body + branches)
    assert result.unknown_loops == ("inner",)
    assert us(result.step_s) == [4 * 6 + 1]


@pytest.mark.parametrize(("name", "target"), [("tpu_v5p.hlo", "v5p:2x2x2"), ("gpu_h100.hlo", "h100:1x1x8")])
def test_on_real_programs_time_is_neither_lost_nor_double(name: str, target: str) -> None:
    result = replay(saved(name), find_target(target), 8)
    assert result.step_s == pytest.approx(result.compute_s + result.exposed_s)
    assert 0 <= result.hidden_s <= min(result.communication_s, result.compute_s)
    for lane in (result.compute, result.collectives):
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(lane))


def test_on_tpu_the_exchanges_of_the_saved_program_have_concurrent_compute() -> None:
    result = replay(saved("tpu_v5p.hlo"), find_target("v5p:2x2x2"), 8)
    assert [(each.kind, each.is_async, each.inside_products) for each in result.collectives] == [
        ("all-to-all", True, 1),
        ("all-to-all", True, 1),
        ("all-to-all", True, 1),
        ("all-to-all", True, 0),
        ("all-reduce", False, 0),
    ]


def test_a_pipeline_runs_the_passes_of_its_busiest_stage_and_waits_for_the_others() -> None:
    """Two stages: (10 | 0), (10 | 10 + 20), (20 | 10 + 20)."""

    def loop(name: str, body: str, scope: str) -> str:
        return f'%{name} = f32[2] while(%p), condition=%until, body=%{body}, metadata={{op_name="jit(step)/{scope}"}}'

    def computation(name: str, *lines: str) -> str:
        return "\n".join([f"%{name} () -> f32[2] {{", *(f"  {line}" for line in lines), "}\n"])

    others = (
        BODY + computation("until") + computation("forward", work("f", 10)) + computation("backward", work("b", 20))
    )
    passes = {"pass_forward_0": [[1, 0], [1, 1], [0, 1]], "pass_backward_0": [[0, 0], [0, 1], [1, 1]]}
    ticks = [loop(f"{name}.loop", name, f"while/body/pass_{name}_0/while") for name in ("forward", "backward")]
    steps = program(loop("ticks", "tick", "while"), others + computation("tick", *ticks))
    result = replay(steps, TOY, 2, passes)
    assert us(result.step_s, result.compute_s, result.idle_s) == [70, 60, 10]
