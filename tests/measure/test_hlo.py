"""Scheduled HLO, read: order, shapes, what calls what, how often loops turn."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.errors import UserError
from moe_jax.measure.costs import is_attention, product_flops
from moe_jax.measure.hlo import num_bytes, parse
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from tests.measure.programs import program, saved


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[2,3]{1,0:T(8,128)(2,1)S(1)}", 24),
        ("(bf16[4]{0}, /*index=1*/s32[])", 12),
        ("pred[16]", 16),
        ("f8e4m3fn[16]", 16),
        ("s4[16]", 8),
        ("token[]", 0),
        ("((u8[3], token[]), u8[])", 4),
    ],
)
def test_a_shape_has_the_bytes_of_its_arrays(shape: str, expected: float) -> None:
    assert num_bytes(shape) == expected


def test_instructions_keep_the_scheduled_order_and_their_parts() -> None:
    entry = saved("tpu_v5p.hlo").computations["main.6_spmd"]
    opcodes = [line.opcode for line in entry]
    starts = [i for i, opcode in enumerate(opcodes) if opcode == "all-to-all-start"]
    assert len(starts) == 4
    first = entry[starts[0]]
    assert first.operands == ("bitcast.29",)
    assert first.op_name == "jit(f)/shard_map/F.dispatch.0.0/all_to_all"
    assert first.shape.startswith("((bf16[8,256,1024]")
    assert first.shape.endswith("u32[]{:S(2)})")
    assert opcodes[-1] == "tuple"


def test_attributes_of_a_kernel_may_have_several_lines() -> None:
    """As those of splash attention, whose work is known by the scopes in the last line."""
    text = (
        "HloModule toy, is_scheduled=true\n\nENTRY %main () -> f32[] {\n  %q = bf16[2,8,4]{2,1,0} parameter(0)\n"
        "  %kernel = bf16[2,8,4]{2,1,0} custom-call(%q, %q, %q), frontend_attributes={kernel_metadata={\n"
        '"xprof_metadata":"{\\"block_q\\": 512}"\n'
        '}}, metadata={op_name="jit(step)/splash_mha_fwd_residuals/pallas_call"}\n'
        "  ROOT %done = f32[] constant(0)\n}\n"
    )
    read = parse(text)
    kernel = read.by_name["kernel"]
    assert is_attention(kernel)
    assert product_flops(kernel, read) == 2 * 8**2 * (4 + 4)
    assert [line.name for line in read.computations["main"]] == ["q", "kernel", "done"]


@pytest.mark.parametrize("name", ["tpu_v5p.hlo", "gpu_h100.hlo"])
def test_every_operand_and_called_computation_of_a_real_program_is_found(name: str) -> None:
    real = saved(name)
    for line in real.by_name.values():
        assert set(line.called) <= set(real.computations)
        if line.opcode not in ("constant", "parameter"):
            assert set(line.operands) <= set(real.by_name), line


@pytest.mark.parametrize("name", ["tpu_v5p.hlo", "gpu_h100.hlo"])
def test_turns_of_a_scan_are_known_from_the_limit_or_from_what_the_compiler_noted(name: str) -> None:
    real = saved(name)
    loops = [line for line in real.by_name.values() if line.opcode == "while"]
    assert [real.trip_count(loop) for loop in loops] == [3]
    assert ("known_trip_count" in loops[0].attributes) == name.startswith("gpu")


def test_turns_of_a_loop_that_ends_on_a_value_are_unknown() -> None:
    condition = "%until () -> pred[] {\n  %a = f32[] parameter(0)\n  %c = f32[] constant(1)\n"
    condition += "  ROOT %p = pred[] compare(%a, %c), direction=GT\n}\n"
    loop = "%w = f32[] while(%a), condition=%until, body=%until"
    toy = program(loop, condition)
    assert toy.trip_count(toy.by_name["w"]) is None


def test_an_instruction_that_the_compiler_made_has_the_scope_of_most_of_its_inside() -> None:
    inside = "%body () -> f32[] {\n"
    for name, scope in (("a", "F.attend.0.0"), ("b", "F.expert.1.0"), ("c", "F.expert.1.0")):
        inside += f'  %{name} = f32[] constant(1), metadata={{op_name="jit(step)/{scope}/mul"}}\n'
    toy = program("%made = f32[] fusion(), kind=kLoop, calls=%body", f"{inside}}}\n")
    assert toy.op_name(toy.by_name["made"]) == "jit(step)/F.expert.1.0/mul"


@pytest.mark.parametrize("text", ["", "HloModule jit_step, entry_computation_layout={}\n", "module @jit_step {"])
def test_text_that_is_not_scheduled_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"compiled\.as_text"):
        parse(text)


def test_loops_over_rows_show_how_many_rows_balanced_routing_makes() -> None:
    """Half of 128 rows in tiles of 8 for 4 groups exist: 8 tiles, and 2 of each group. Forward and backward."""
    grouped = GROUPED_PRODUCTS["cpu"]["blocks"]._replace(filled=0.5)

    def total(x: jax.Array, w: jax.Array, size_L: jax.Array) -> jax.Array:
        product = grouped.of(size_L, len(x), 8)
        return product.multiply(x, w, *product.groups).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 4), (4, 4, 4))]
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*shapes, jax.ShapeDtypeStruct((4,), jnp.int32)).compile()
    program = parse(compiled.as_text() or "")
    loops = [line for line in program.by_name.values() if line.opcode == "while"]
    trips = sorted((program.balanced_trip_count(loop) or 0, program.trip_count(loop) or 0) for loop in loops)
    assert trips == [(0, 4), (2, 0), (8, 0)]
