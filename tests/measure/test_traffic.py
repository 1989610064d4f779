"""What compiled exchanges send, counted message by message from their programs, against the closed forms."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from moe_jax.measure.hlo import HloError, parse
from moe_jax.measure.traffic import by_phase, bytes_sent, exchanges, side_by_side, traffic_of
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.exchange import ALGORITHMS, steps_of, traffic
from tests.measure.programs import program
from tests.parallel.per_device import on_mesh

ROWS, WIDTH = 3, 16  # of each block
NUM_BYTES = 8 * ROWS * WIDTH * 4  # a rank holds, for 8 ranks


def compiled(name, per_node):
    def body(x):
        return EXCHANGES[name](2 * x, Ranks(Axis.EXPERT, "cpu", per_node)) + 1

    x = jax.ShapeDtypeStruct((64, ROWS, WIDTH), jnp.float32)
    return parse(on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=1, expert=8).lower(x).compile().as_text())


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rank_sends_what_the_closed_form_predicts(name, per_node):
    steps = steps_of(name, NUM_BYTES, 8 // per_node, per_node)
    phases = by_phase(exchanges(compiled(name, per_node), 8), steps)
    assert set(phases) == {phase.name for step in steps for phase in step}
    for phase, found in phases.items():
        forms = [form for form in itertools.chain(*steps) if form.name == phase]
        for rank, sent in enumerate(traffic_of(found, 8, per_node)):
            assert sent == traffic(forms, leader=rank % per_node == 0), (phase, rank)


def test_phases_are_among_the_ranks_of_a_node_or_among_equal_members():
    phases = by_phase(exchanges(compiled("hier_2d", 4), 8), steps_of("hier_2d", NUM_BYTES, 2, 4))
    (inside,), (between,) = phases["inside"], phases["between"]
    assert inside.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert between.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    leaders = by_phase(exchanges(compiled("hier_1d", 4), 8), steps_of("hier_1d", NUM_BYTES, 2, 4))["between"]
    assert [sorted(permute.groups) for permute in leaders] == [[(0, 4), (4, 0)]]


def lines(order):
    """Permutes named a, b, …: a lower-case letter starts one, a capital one ends it."""
    made = ["%x = u8[4] parameter(0)"]
    for letter in order:
        if letter.islower():
            pairs = "source_target_pairs={{0,1},{1,0}}"
            scopes = f'metadata={{op_name="jit(f)/{letter}/ppermute"}}'
            made.append(f"%{letter} = (u8[4], u8[4]) collective-permute-start(%x), {pairs}, {scopes}")
        else:
            made.append(f"%{letter} = u8[4] collective-permute-done(%{letter.lower()})")
    return program("\n".join(made))


@pytest.mark.parametrize(("order", "expected"), [("abAB", True), ("abBA", True), ("baAB", True), ("aAbB", False)])
def test_two_run_side_by_side_if_each_starts_before_the_other_is_done(order, expected):
    found = exchanges(lines(order), 2)
    first, second = ([each for each in found if name in each.scopes] for name in "ab")
    assert side_by_side(first, second) == side_by_side(second, first) == expected
    assert all(each.is_async for each in found)


@pytest.mark.parametrize(("order", "expected"), [("asA", True), ("aAs", False), ("saA", False)])
def test_what_is_synchronous_runs_concurrently_with_what_was_started_before_and_ends_after(order, expected):
    permute = "source_target_pairs={{0,1},{1,0}}"
    texts = {
        "a": f"%a = (u8[4], u8[4]) collective-permute-start(%x), {permute}",
        "A": "%A = u8[4] collective-permute-done(%a)",
        "s": f"%s = u8[4] collective-permute(%x), {permute}",
    }
    made = program("\n".join(["%x = u8[4] parameter(0)", *(texts[letter] for letter in order)]))
    first, second = exchanges(made, 2)
    assert side_by_side([first], [second]) == side_by_side([second], [first]) == expected


@pytest.mark.parametrize("turns", [1, 3])
def test_bytes_in_loops_count_as_often_as_they_turn(turns):
    def body(x):
        def turn(x, _):
            return EXCHANGES["flat"](2 * x, Ranks(Axis.EXPERT, "cpu")), None

        return jax.lax.scan(turn, x, length=turns)[0]

    x = jax.ShapeDtypeStruct((64, ROWS, WIDTH), jnp.float32)
    text = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=1, expert=8).lower(x).compile().as_text()
    assert bytes_sent(parse(text), "all-to-all", 8) == turns * NUM_BYTES * 7 / 8
    assert bytes_sent(parse(text), "all-gather", 8) == 0


def test_what_is_synchronous_runs_alone():
    made = "%x = u8[4] parameter(0)\n"
    made += "%a = u8[4] collective-permute(%x), source_target_pairs={{0,1}}\n"
    (found,) = exchanges(program(made), 2)
    assert not found.is_async
    assert not side_by_side([found], [found])
    assert [sent.inside.messages for sent in traffic_of([found], 2, 2)] == [1, 0]
    assert [sent.between.num_bytes for sent in traffic_of([found], 2, 1)] == [4, 0]


@pytest.mark.parametrize(("limit", "times"), [("constant(3)", 3), ("constant(0)", 0), ("parameter(1)", None)])
def test_a_loop_counts_as_often_as_it_is_known_to_turn(limit, times):
    """A loop with an unknown number of iterations is no loop of one iteration."""
    made = parse(
        f"""HloModule toy, is_scheduled=true

%body (p: (u8[4], s32[])) -> (u8[4], s32[]) {{
  %p = (u8[4], s32[]) parameter(0)
  %x = u8[4] get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %a = u8[4] collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %t = (u8[4], s32[]) tuple(%a, %i)
}}

%cond (q: (u8[4], s32[])) -> pred[] {{
  %q = (u8[4], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=1
  %n = s32[] {limit}
  ROOT %less = pred[] compare(%j, %n), direction=LT
}}

ENTRY %main (x: (u8[4], s32[])) -> (u8[4], s32[]) {{
  %y = (u8[4], s32[]) parameter(0)
  ROOT %w = (u8[4], s32[]) while(%y), condition=%cond, body=%body
}}
"""
    )
    assert bytes_sent(made, "all-to-all", 2) == 0
    if times is not None:
        assert bytes_sent(made, "collective-permute", 2) == 4 * times
        return
    with pytest.raises(HloError, match="w is a loop with an unknown number of iterations"):
        bytes_sent(made, "collective-permute", 2)
