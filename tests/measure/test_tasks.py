"""A schedule compared with its program: what is found, merged, split and moved."""

import pytest

from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import find_target
from moe_jax.measure.tasks import Match, action_of, match, name_iterations
from moe_jax.schedule.actions import Action
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import Parts, StepShape
from tests.measure.programs import BODY, TOY, done, operand, program, saved, start, work

SHAPE = StepShape(kinds=("moe",), forward=Parts(2, 2))


def schedule(text: str) -> Schedule:
    return Schedule("unified", SHAPE, tuple(map(Action.parse, text.split())))


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def hold(text: str, *lines: str) -> Match:
    toy = program("\n".join([operand(10), *lines]), BODY)
    return match(schedule(text), toy, replay(toy, TOY, 2))


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/shard_map/F.dispatch.3.0/all_to_all", "F.dispatch.3.0"),
        ("jit(step)/B.expert.1.0/transpose(jvp(F.expert.1.0))/dot_general", "B.expert.1.0"),
        ("jit(step)/transpose(G.counts.0)/psum", "G.counts.0"),
        ("jit(step)/X.dispatch.3.0/F.nonsense.1.0/F.head.2", "F.head.2"),
        ("jit(step)/shard_map/jvp(dispatch)/all_to_all", None),
        ("", None),
    ],
)
def test_an_instruction_belongs_to_its_outermost_task(op_name: str, expected: str | None) -> None:
    assert action_of(op_name) == (expected and Action.parse(expected))


def sent(name: str) -> str:
    return f"{start(name.replace('.', '_'), 10, name)}\n{done(name.replace('.', '_'))}"


def test_a_program_in_order_has_nothing_to_report() -> None:
    order = "F.attend.0.0 F.dispatch.0.0 F.expert.0.0 F.combine.0.0"
    found = hold(
        order, work("a", 1, "F.attend.0.0"), sent("F.dispatch.0.0"), work("b", 1, "F.expert.0.0"), sent("F.combine.0.0")
    )
    assert (found.missing, found.merged, found.split, found.moved) == ((), (), {}, ())
    assert found.instructions[Action.parse("F.attend.0.0")] == ("a",)


def test_the_fewest_actions_that_explain_the_order_have_moved() -> None:
    order = "F.dispatch.0.0 F.dispatch.0.1 F.combine.0.0 F.combine.0.1"
    issued = [sent(name) for name in ("F.dispatch.0.1", "F.combine.0.0", "F.dispatch.0.0", "F.combine.0.1")]
    assert hold(order, *issued).moved == actions("F.dispatch.0.0")


def test_a_task_without_a_collective_is_missing_and_one_with_two_is_split() -> None:
    found = hold(
        "F.dispatch.0.0 F.dispatch.0.1", sent("F.dispatch.0.0"), sent("F.dispatch.0.0").replace("F_", "again_")
    )
    assert found.missing == actions("F.dispatch.0.1")
    assert found.split == {Action.parse("F.dispatch.0.0"): 2}


@pytest.mark.parametrize("ordered", [False, True], ids=["a part of it", "only after it"])
def test_what_only_waits_for_a_collective_is_no_part_of_it(ordered: bool) -> None:
    """XLA:CPU keeps an order by a value that it computes from the collective's result and does not need."""
    taken = "%later" if ordered else "%first"
    body = (
        "%part (first: u8[10], later: u8[10]) -> u8[5] {\n  %first = u8[10] parameter(0)\n"
        f"  %later = u8[10] parameter(1)\n  ROOT %slice = u8[5] slice({taken}), slice={{[0:5]}}\n}}\n"
    )
    part = (
        "%of_it = u8[5] fusion(%F_dispatch_0_0.done, %x10), kind=kLoop, calls=%part, "
        'metadata={op_name="jit(step)/F.dispatch.0.1/slice"}'
    )
    toy = program("\n".join([operand(10), sent("F.dispatch.0.0"), part]), body)
    found = match(schedule("F.dispatch.0.0 F.dispatch.0.1"), toy, replay(toy, TOY, 2))
    assert found.merged == (() if ordered else (actions("F.dispatch.0.0 F.dispatch.0.1"),))


@pytest.mark.parametrize(("name", "target"), [("tpu_v5p.hlo", "v5p:2x2x2"), ("gpu_h100.hlo", "h100:1x1x8")])
def test_reductions_that_real_compilers_merged_are_named(name: str, target: str) -> None:
    real = saved(name)
    order = "F.dispatch.0.0 F.dispatch.0.1 F.combine.0.0 F.combine.0.1 G.reduce.0.0 G.reduce.1.0"
    found = match(schedule(order), real, replay(real, find_target(target), 8))
    assert found.merged == (actions("G.reduce.0.0 G.reduce.1.0"),)
    assert found.missing == ()
    swapped = name.startswith("gpu")  # its scheduler took the second microbatch first
    assert len(found.moved) == (2 if swapped else 0)


def test_products_that_the_gpu_compiler_merged_leave_a_task_without_any() -> None:
    real = saved("gpu_h100.hlo")
    found = match(schedule("F.expert.0.0 F.expert.0.1"), real, replay(real, find_target("h100:1x1x8"), 8))
    assert found.products == {Action.parse("F.expert.0.0"): 1, Action.parse("F.expert.0.1"): 0}


def test_turns_of_loops_have_the_names_of_their_blocks_forward_from_the_lowest_backward_to_it() -> None:
    def loop(name: str, body: str) -> tuple[str, str]:
        computations = (
            f"%{name}.turn () -> s32[] {{\n  {operand(10)}\n{body}\n}}\n"
            f"%{name}.more () -> pred[] {{\n  %{name}.i = s32[] parameter(0)\n"
            f"  %{name}.n = s32[] constant(3)\n"
            f"  ROOT %{name}.lt = pred[] compare(%{name}.i, %{name}.n), direction=LT\n}}\n"
        )
        return f"%{name} = s32[] while(%x10), condition=%{name}.more, body=%{name}.turn", computations

    lines = (work("v", 1, "F.attend.1.0"), start("u", 10, "F.dispatch.1.0"), done("u"), work("w", 1, "F.attend.2.0"))
    up = "\n".join(f"  {line}" for line in lines)
    down = f"  {start('d', 10, 'B.dispatch.2.0')}\n  {done('d')}\n  {start('g', 10, 'G.reduce.3.0')}\n  {done('g')}"
    forward, forward_parts = loop("forward", up)
    backward, backward_parts = loop("backward", down)
    toy = program("\n".join([operand(10), forward, backward]), BODY + forward_parts + backward_parts)
    order = (
        "F.attend.1.0 F.dispatch.1.0 F.attend.2.0 F.attend.3.0 F.dispatch.3.0 F.attend.4.0 F.attend.5.0 F.dispatch.5.0 "
    )
    order += "F.attend.6.0 B.dispatch.6.0 G.reduce.7.0 B.dispatch.4.0 G.reduce.5.0 B.dispatch.2.0 G.reduce.3.0"
    plan = Schedule("unified", StepShape(kinds=("moe",) * 8, forward=Parts(2, 2)), actions(order))
    whole = name_iterations(replay(toy, TOY, 2), plan)
    walked = [action_of(task.op_name) for task in whole.compute]
    assert walked == [action for action in plan.actions if action.op == "attend"]
    found = match(plan, toy, whole)
    assert (found.missing, found.split, found.moved) == ((), {}, ())
    assert set(found.instructions) == set(plan.actions)
