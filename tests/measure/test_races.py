"""Races between collectives, found in programs that XLA:CPU compiled and in small ones written by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from moe_jax.measure.hlo import parse
from moe_jax.measure.races import RaceError, check_races, races
from moe_jax.parallel.ordering import depend_on

SIZE = 64
SUM = "channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"
# A loop that sums its second element, reads its third and hands on the fourth.
MODULE = f"""HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8], f32[8], f32[8])) -> (s32[], f32[8], f32[8], f32[8]) {{
  %p = (s32[], f32[8], f32[8], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %y = f32[8] get-tuple-element(%p), index=2
  %z = f32[8] get-tuple-element(%p), index=3
  %next = s32[] fusion(%n), kind=kLoop, calls=%increment
  %sum = f32[8] all-reduce(%x), {SUM}, metadata={{op_name="sum_in_loop"}}
  %more = f32[8] add(%sum, %y)
  ROOT %result = (s32[], f32[8], f32[8], f32[8]) tuple(%next, %more, %y, %z)
}}

%condition (q: (s32[], f32[8], f32[8], f32[8])) -> pred[] {{
  %q = (s32[], f32[8], f32[8], f32[8]) parameter(0)
  %m = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] fusion(%m), kind=kLoop, calls=%compare
}}

%branch (r: f32[8]) -> f32[8] {{
  %r = f32[8] parameter(0)
  ROOT %gathered = f32[8] all-to-all(%r), channel_id=1, replica_groups={{{{0,1,2,3}}}}
}}

%other (s: f32[8]) -> f32[8] {{
  %s = f32[8] parameter(0)
  ROOT %as_it_is = f32[8] copy(%s)
}}

ENTRY %main (a: f32[8], b: f32[8], c: pred[]) -> (f32[8], f32[8]) {{
  %a = f32[8] parameter(0)
  %b = f32[8] parameter(1)
  %c = pred[] parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8], f32[8], f32[8]) tuple(%zero, %a, %a, %b)
BODY
}}
"""
LOOP = """  %loop = (s32[], f32[8], f32[8], f32[8]) while(%start), condition=%condition, body=%body
  %looped = f32[8] get-tuple-element(%loop), index=1
  %read = f32[8] get-tuple-element(%loop), index=2
  %passed = f32[8] get-tuple-element(%loop), index=3
"""


def found(*lines: str) -> list[str]:
    """Races of a program with these lines."""
    text = MODULE.replace("BODY", "\n".join(line.rstrip("\n") for line in lines))
    return [str(race) for race in races(parse(text))]


def all_reduce(of: str, name: str = "last") -> str:
    return f'  ROOT %{name} = f32[8] all-reduce(%{of}), {SUM}, metadata={{op_name="sum_after"}}'


def test_a_sum_that_does_not_wait_for_a_loop_of_sums_is_a_race():
    assert found(LOOP, all_reduce("b")) == ["sum_in_loop (in while loop) and sum_after (in last)"]
    assert not found(LOOP, all_reduce("looped"))
    assert not found(all_reduce("b", "first").replace("ROOT ", ""), LOOP), "a sum keeps its thread until it is done"


def test_what_a_loop_reads_or_hands_on_does_not_wait_for_it():
    """XLA:CPU waits for who writes a buffer; what a loop does not change can be had before it has ended."""
    assert found(LOOP, all_reduce("read"))
    assert found(LOOP, all_reduce("passed"))


def test_a_second_loop_waits_for_what_it_reads_and_not_for_what_it_hands_on():
    second = "  ROOT %second = (s32[], f32[8], f32[8], f32[8]) while(%again), condition=%condition, body=%body"
    again = "  %again = (s32[], f32[8], f32[8], f32[8]) tuple(%zero, {}, {}, {})"
    assert not found(LOOP, again.format("%looped", "%a", "%b"), second)
    assert not found(LOOP, again.format("%a", "%looped", "%b"), second)
    assert found(LOOP, again.format("%a", "%b", "%looped"), second)
    assert found(LOOP, again.format("%a", "%b", "%passed"), second)


def test_branches_are_looked_into_and_pairs_of_one_kind_named():
    branch = "  %one = f32[8] conditional(%c, %a, %b), true_computation=%branch, false_computation=%other"
    with_loop, with_sum = found(branch, LOOP, all_reduce("looped"))
    assert with_loop == "gathered (in conditional one) and sum_in_loop (in loop)"
    assert with_sum == "gathered (in conditional one) and sum_after (in last)"
    assert not found(LOOP, branch.replace("%a", "%looped"))


def test_the_message_names_which_and_what_to_do():
    with pytest.raises(
        RaceError, match=r"sum_in_loop .* and sum_after .*, and 1 more: use schedule\.grad_reduce=block"
    ):
        check_races(MODULE.replace("BODY", LOOP + all_reduce("b", "one").replace("ROOT ", "") + "\n" + all_reduce("a")))


def text_of(body: Callable[[jax.Array, jax.Array], object]) -> str:
    """The text of a program over four devices; its arguments hold other numbers on each."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("ranks",))
    over = PartitionSpec("ranks")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(over, over), out_specs=over, check_vma=False))
    shape = jax.ShapeDtypeStruct((4 * SIZE,), jnp.float32)
    return run.lower(shape, shape).compile().as_text() or ""


def total(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "ranks")


def looped(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 4, lambda _, x: total(x) * 0.5, x)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x, y: (looped(x), looped(y)), 1),
        (lambda x, y: (total(x), total(y)), 0),
        (lambda x, y: total(looped(x)) + y, 0),
        (lambda x, y: (looped(total(x)), y), 0),
        (lambda x, y: looped(looped(x)) + y, 0),
        (lambda x, y: (one := looped(x), looped(depend_on(y, one, "cpu"))), 0),
    ],
    ids=["two loops", "no loop", "sum of a loop's", "loop over a sum's", "loop over a loop's", "tied"],
)
def test_races_of_programs_that_the_compiler_made(body, expected):
    assert len(races(parse(text_of(body)))) == expected
