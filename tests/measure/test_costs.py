"""How long one instruction takes: bytes that leave a device, cycles, rooflines."""

import dataclasses
import itertools
from collections import defaultdict

import numpy as np
import pytest

from moe_jax.measure.costs import (
    collective_seconds,
    compute_seconds,
    groups_of,
    link_seconds,
    matrix_products,
    product_flops,
    sent_bytes,
)
from moe_jax.measure.hlo import HloError
from moe_jax.plan.clusters.hardware import RateShares
from tests.measure.programs import LINK, TOY, program

EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}"
NODES_OF_FOUR = dataclasses.replace(TOY, node_devices=4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"all-to-all(%x), {EIGHT}", 80 * 7 / 8),
        (f"all-reduce(%x), {EIGHT}", 80 * 14 / 8),
        (f"all-reduce(%x, %x), {EIGHT}", 160 * 14 / 8),
        (f"reduce-scatter(%x), {EIGHT}", 80 * 7 / 8),
        (f"all-gather(%x), {EIGHT}", 80 * 7),
        ("all-to-all(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}", 40),
        ("all-to-all(%x), replica_groups=[4,2]<=[8]", 40),
        ("all-to-all(%x), replica_groups=mesh['data'=4,'expert'=2] {'expert'}", 40),
        ("all-to-all(%x), replica_groups={}", 80 * 7 / 8),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 80),
        (f"ragged-all-to-all(%x, %out, %n, %n, %n, %n), {EIGHT}", 80 * 7 / 8),
        (
            f'ragged-all-to-all(%x, %out, %n, %n, %n, %n), {EIGHT}, metadata={{op_name="s/F.dispatch.0.0/overflow/r"}}',
            0,
        ),
    ],
)
def test_bytes_that_leave_a_device(line: str, expected: float) -> None:
    toy = program(
        f"%x = u8[80] parameter(0)\n%out = u8[800] parameter(1)\n%n = s32[8] parameter(2)\n%c = u8[80] {line}"
    )
    assert sent_bytes(toy.by_name["c"], toy, num_devices=8) == pytest.approx(expected)


def test_an_overflow_whose_name_the_compiler_lost_is_known_by_its_buffer() -> None:
    toy = program(
        """%x = u8[80] parameter(0)
        %out = u8[800] broadcast(%x), metadata={op_name="step/F.dispatch.0.0/overflow/empty"}
        %c = u8[80] ragged-all-to-all(%x, %out, %x, %x, %x, %x), replica_groups={{0,1}}"""
    )
    assert sent_bytes(toy.by_name["c"], toy, 2) == 0
    assert toy.op_name(toy.by_name["c"]) == "step/F.dispatch.0.0/overflow/empty"


@pytest.mark.parametrize(
    ("groups", "network"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", False),
        ("[2,4]<=[8]", False),
        ("[4,2]<=[2,4]T(1,0)", True),
        ("{{0,4},{1,5},{2,6},{3,7}}", True),
        ("mesh['data'=2,'expert'=4] {'expert'}", False),
        ("mesh['data'=2,'expert'=4] {'data'}", True),
    ],
)
def test_groups_within_a_node_use_its_links_others_the_network(groups: str, network: bool) -> None:
    toy = program(f"%x = u8[80] parameter(0)\n%c = u8[80] all-reduce(%x), replica_groups={groups}")
    seconds = collective_seconds(toy.by_name["c"], toy, NODES_OF_FOUR, 8)
    assert seconds == pytest.approx(sent_bytes(toy.by_name["c"], toy, 8) * (10e-6 if network else 1e-6))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['a'=1,'b'=8] {'a','b':(1)4}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2,'a','b':(1)2}", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,0,1) {'a':(1)2}", [[7, 3], [6, 2], [5, 0], [4, 1]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_groups_of_devices_are_read_in_every_form(groups: str, expected: list[list[int]]) -> None:
    """With their order: the first rank of a group is the first that is listed."""
    toy = program(f"%x = u8[80] parameter(0)\n%c = u8[80] all-reduce(%x), replica_groups={groups}, channel_id=1")
    assert groups_of(toy.by_name["c"], 8).tolist() == expected


@pytest.mark.parametrize(
    "grouped",
    [
        [("a", 1, 4)],
        [("b", 2, 3)],
        [("c", 1, 12)],
        [("c", 2, 3), ("a", 1, 4)],
        [("c", 6, 2), ("b", 1, 2), ("c", 1, 2)],
        [("b", 1, 6), ("c", 3, 4), ("a", 2, 2)],
    ],
)
@pytest.mark.parametrize("ids", [None, "([12,24]T(1,0))", "list"])
def test_groups_over_a_mesh_are_the_devices_that_differ_along_its_parts_only(
    grouped: list[tuple[str, int, int]], ids: str | None
) -> None:
    """The part (p)s of an axis of n ranks is the digit rank ÷ (n / (p s)) mod s; the first one listed is slowest."""
    sizes = {"a": 4, "b": 6, "c": 12}
    devices = np.arange(288)
    if ids is not None:
        devices = np.arange(288).reshape(12, 24).T.ravel() if ids.startswith("([") else devices[::-1] ^ 1
    expected: dict[tuple[int, ...], list[tuple[list[int], int]]] = defaultdict(list)
    for ranks, device in zip(itertools.product(*map(range, sizes.values())), devices.tolist(), strict=True):
        own = dict(zip(sizes, ranks, strict=True))
        digits = [own[name] // (sizes[name] // (p * s)) % s for name, p, s in grouped]
        for (name, p, s), digit in zip(grouped, digits, strict=True):
            own[name] -= digit * (sizes[name] // (p * s))
        expected[tuple(own.values())].append((digits, device))
    axes = ",".join(f"'{name}'" if s == sizes[name] else f"'{name}':({p}){s}" for name, p, s in grouped)
    order = f", device_ids=({','.join(map(str, devices))})" if ids == "list" else f", device_ids={ids}" if ids else ""
    line = f"all-reduce(%x), channel_id=1, replica_groups=mesh['a'=4,'b'=6,'c'=12]{order} {{{axes}}}, to_apply=%sum"
    toy = program(f"%x = u8[80] parameter(0)\n%c = u8[80] {line}")
    found = groups_of(toy.by_name["c"], 288).tolist()
    assert found == [[device for _, device in sorted(group)] for _, group in sorted(expected.items())]


@pytest.mark.parametrize("groups", ["mesh['a'=8] {'a':(3)2}", "mesh['a'=8] {'b'}", "somehow"])
def test_groups_in_an_unknown_form_are_refused(groups: str) -> None:
    """And not taken for all devices."""
    toy = program(f"%x = u8[80] parameter(0)\n%c = u8[80] all-reduce(%x), replica_groups={groups}, channel_id=1")
    with pytest.raises(HloError) as error:
        sent_bytes(toy.by_name["c"], toy, 8)
    assert str(error.value).startswith(f"c has replica_groups={groups}, a form of groups that is not known: ")


@pytest.mark.parametrize(("pairs", "network"), [("{{0,1},{4,5}}", False), ("{{0,1},{3,4}}", True)])
def test_a_permute_uses_the_network_if_one_of_its_messages_does(pairs: str, network: bool) -> None:
    toy = program(f"%x = u8[80] parameter(0)\n%c = u8[80] collective-permute(%x), source_target_pairs={pairs}")
    assert collective_seconds(toy.by_name["c"], toy, NODES_OF_FOUR, 8) == pytest.approx(
        80 * (10e-6 if network else 1e-6)
    )


@pytest.mark.parametrize(
    ("collective", "inside", "between"),
    [
        ("all-to-all(%x)", 3 * 10, 4 * 10),  # a block of 10 bytes for every rank
        ("ragged-all-to-all(%x, %x, %x, %x, %x, %x)", 3 * 10, 4 * 10),
        ("reduce-scatter(%x)", 3 * 20, 10),  # summed inside first: a quarter each, of which one half is sent on
        ("all-gather(%x)", 3 * 160, 80),  # own bytes to the other node, then those of two ranks to three neighbours
        ("all-reduce(%x)", 2 * 60, 2 * 10),  # the two above
    ],
)
def test_bytes_for_the_own_node_use_its_links_and_only_the_others_the_network(
    collective: str, inside: int, between: int
) -> None:
    toy = program(f"%x = u8[80] parameter(0)\n%c = u8[80] {collective}, {EIGHT}")
    found = link_seconds(toy.by_name["c"], toy, NODES_OF_FOUR, 8)
    assert found == pytest.approx({"inside": inside * 1e-6, "between": between * 10e-6})
    assert sum((inside, between)) == pytest.approx(sent_bytes(toy.by_name["c"], toy, 8))
    assert collective_seconds(toy.by_name["c"], toy, NODES_OF_FOUR, 8) == pytest.approx(between * 10e-6)
    fast_network = dataclasses.replace(NODES_OF_FOUR, network=LINK)
    assert collective_seconds(toy.by_name["c"], toy, fast_network, 8) == pytest.approx(max(inside, between) * 1e-6)


def test_in_uneven_nodes_the_busiest_rank_counts() -> None:
    toy = program("%x = u8[90] parameter(0)\n%c = u8[90] all-to-all(%x), replica_groups={{0,1,4},{2,3,5}}")
    found = link_seconds(toy.by_name["c"], toy, NODES_OF_FOUR, 8)
    assert found == pytest.approx({"inside": 30e-6, "between": 2 * 30 * 10e-6})  # of rank 0, of rank 4


def test_a_ragged_exchange_sends_no_more_rows_than_its_target_takes() -> None:
    toy = program(
        """%x = u8[80] parameter(0)
        %out = u8[40] parameter(1)
        %c = u8[40] ragged-all-to-all(%x, %out, %x, %x, %x, %x), replica_groups={{0,1}}"""
    )
    assert sent_bytes(toy.by_name["c"], toy, 2) == 20


@pytest.mark.parametrize(("backward", "products"), [("", 2), ("Backward", 5)])
def test_flash_attention_costs_the_products_of_half_of_all_pairs(backward: str, products: int) -> None:
    toy = program(
        f"""%q = bf16[3,64,8,16] parameter(0)
        %k = bf16[3,64,2,16] parameter(1)
        %y = bf16[3,64,8,16] custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax{backward}\""""
    )
    flops = 3 * 8 * (64 * 64 / 2) * 2 * products * 16
    assert product_flops(toy.by_name["y"], toy) == flops
    assert matrix_products(toy.by_name["y"], toy) == 1
    assert compute_seconds(toy.by_name["y"], toy, dataclasses.replace(TOY, clock_hz=None)) == pytest.approx(flops / 1e6)


@pytest.mark.parametrize(("kernel", "widths"), [("fwd", 24 + 16), ("dq", 2 * 24 + 16), ("dkv", 2 * 24 + 2 * 16)])
def test_splash_attention_costs_the_products_of_its_kernel(kernel: str, widths: int) -> None:
    toy = program(
        f"""%m = s8[1,4,4] parameter(0)
        %q = bf16[3,2,4,64,24] parameter(1)
        %k = bf16[3,2,64,24] parameter(2)
        %v = bf16[3,2,64,16] parameter(3)
        %y = bf16[3,2,4,64,16] custom-call(%m, %q, %k, %v), custom_call_target="tpu_custom_call", """
        f"""metadata={{op_name="jit(f)/vmap(jit(_splash_attention))/splash_mqa_{kernel}_residuals/pallas_call"}}"""
    )
    assert product_flops(toy.by_name["y"], toy) == 3 * 2 * 4 * (64 * 64 / 2) * 2 * widths
    assert matrix_products(toy.by_name["y"], toy) == 1


def test_memory_that_is_never_filled_costs_nothing() -> None:
    toy = program('%x = u8[80] custom-call(), custom_call_target="AllocateBuffer"')
    assert compute_seconds(toy.by_name["x"], toy, TOY) == 0
    toy = program(
        """%x = u8[8] parameter(0)
        %y = u8[80] custom-call(%x), custom_call_target="tpu_custom_call", """
        """metadata={op_name="jit(f)/F.dispatch.1.0/jvp(rows)/uninitialized/pallas_call"}"""
    )
    assert compute_seconds(toy.by_name["y"], toy, TOY) == 0


def test_a_group_of_one_device_costs_nothing() -> None:
    toy = program("%x = u8[80] parameter(0)\n%c = u8[80] all-reduce(%x), replica_groups={{0},{1}}")
    assert collective_seconds(toy.by_name["c"], toy, TOY, 2) == 0


DOT = """%dot () -> f32[4,6] {
  %a = f32[4,5] parameter(0)
  %b = f32[5,6] parameter(1)
  ROOT %d = f32[4,6] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_estimated_cycles_come_before_the_roofline() -> None:
    inputs = "%p = f32[4,5] parameter(0)\n%q = f32[5,6] parameter(1)\n"
    call = "%f = f32[4,6] fusion(%p, %q), kind=kOutput, calls=%dot"
    estimated = program(f'{inputs}{call}, backend_config={{"estimated_cycles":"7"}}', DOT)
    assert compute_seconds(estimated.by_name["f"], estimated, TOY) == pytest.approx(7e-6)
    without = program(inputs + call, DOT)
    flops, num_bytes = 2 * 4 * 5 * 6, 4 * (4 * 5 + 5 * 6 + 4 * 6)
    assert compute_seconds(without.by_name["f"], without, TOY) == pytest.approx(max(flops, num_bytes) * 1e-6)
    fast_memory = TOY.__class__(**{**TOY.__dict__, "memory_bytes_per_s": 1e12})
    assert compute_seconds(without.by_name["f"], without, fast_memory) == pytest.approx(flops * 1e-6)
    assert matrix_products(without.by_name["f"], without) == 1


def test_cycles_that_say_unknown_are_no_time() -> None:
    """The compiler writes the largest integer for kernels of the SparseCore; added up, a step took centuries."""
    cycles = f'backend_config={{"estimated_cycles":"{2**63 - 1}"}}'
    toy = program(f"%p = f32[4] parameter(0)\n%s = f32[4] scatter(%p), {cycles}")
    assert compute_seconds(toy.by_name["s"], toy, TOY) == pytest.approx((16 + 16) * 1e-6)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        ("%y = f32[8,6] custom-call(%n, %x, %w), {0}/ragged_dot_general/ragged-dot-none", 2 * 8 * 5 * 6),
        ("%y = f32[8,6] custom-call(%n, %x, %w), {0}/grouped_rows/pallas_call", 2 * 8 * 5 * 6),
        ("%y = f32[3,5,6] custom-call(%n, %x, %dy), {0}/grouped_weights/pallas_call", 2 * 8 * 5 * 6),
        ("%y = s32[3] custom-call(%n), {0}/ragged-dot-metadata", 0),
    ],
)
def test_a_product_in_groups_costs_the_rows_that_balanced_routing_fills(call: str, flops: int) -> None:
    name, scopes = call.split(", {0}")
    toy = program(
        f"""%n = s32[3] parameter(0)
        %x = f32[8,5] parameter(1)
        %dy = f32[8,6] parameter(2)
        %w = f32[3,5,6] parameter(3)
        {name}, custom_call_target="kernel", metadata={{op_name="jit(step)/filled_50_percent{scopes}"}}"""
    )
    assert product_flops(toy.by_name["y"], toy) == flops / 2
    assert matrix_products(toy.by_name["y"], toy) == (flops > 0)


def test_library_products_count_as_products() -> None:
    toy = program(
        """%a = f32[4,5] parameter(0)
        %b = f32[5,6] parameter(1)
        %g = (f32[4,6], s8[64]) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", """
        """backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""
    )
    fast_memory = TOY.__class__(**{**TOY.__dict__, "memory_bytes_per_s": 1e12})
    assert compute_seconds(toy.by_name["g"], toy, fast_memory) == pytest.approx(240e-6)
    assert matrix_products(toy.by_name["g"], toy) == 1


def test_our_own_kernels_count_as_products() -> None:
    toy = program(
        """%a = f32[4,5] parameter(0)
        %k = f32[4,6] custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", """
        """metadata={op_name="jit(step)/jvp(experts)/grouped_rows/pallas_call"}
        %o = f32[4,6] custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", """
        """metadata={op_name="jit(step)/jvp(experts)/other/pallas_call"}"""
    )
    assert [matrix_products(toy.by_name[name], toy) for name in ("k", "o")] == [1, 0]


def test_only_the_rows_of_a_gather_and_the_slice_of_an_update_are_moved() -> None:
    fused = """%rows () -> f32[1,10] {
      %table = f32[1000,10] parameter(0)
      %i = s32[1,1] parameter(1)
      ROOT %g = f32[1,10] gather(%table, %i)
    }
    %update () -> f32[1000,10] {
      %all = f32[1000,10] parameter(0)
      %row = f32[1,10] parameter(1)
      ROOT %u = f32[1000,10] dynamic-update-slice(%all, %row)
    }
    """
    toy = program(
        """%t = f32[1000,10] parameter(0)
        %n = s32[1,1] parameter(1)
        %r = f32[1,10] fusion(%t, %n), kind=kCustom, calls=%rows
        %w = f32[1000,10] fusion(%t, %r), kind=kLoop, calls=%update""",
        "\n".join(
            line.strip() if line.strip().startswith(("%rows", "%update", "}")) else f"  {line.strip()}"
            for line in fused.splitlines()
        ),
    )
    assert compute_seconds(toy.by_name["r"], toy, TOY) == pytest.approx((40 + 4 + 40) * 1e-6)
    assert compute_seconds(toy.by_name["w"], toy, TOY) == pytest.approx((40 + 40) * 1e-6)


@pytest.mark.parametrize(
    ("dtype", "attributes", "share"),
    [
        ("bf16", "", 1.0),
        ("f32", "", 0.5),
        ("f32", ", operand_precision={highest,highest}", 0.1),
        ("f8e4m3fn", "", 2.0),
    ],
)
@pytest.mark.parametrize("form", ["dot", "cublas"])
def test_products_take_the_rate_of_their_operands(form: str, dtype: str, attributes: str, share: float) -> None:
    call = "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}" + attributes
    if form == "cublas":
        precision = '"operand_precision":["HIGHEST","HIGHEST"]' if attributes else '"operand_precision":["DEFAULT"]'
        call = (
            'custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            f'{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}},"precision_config":{{{precision}}}}}}}'
        )
    toy = program(f"%x = {dtype}[512,256] parameter(0)\n%y = {dtype}[256,128] parameter(1)\n%z = f32[512,128] {call}")
    target = dataclasses.replace(
        TOY, clock_hz=None, memory_bytes_per_s=1e18, rate_shares=RateShares(float32=0.5, exact=0.1, fp8=2.0)
    )
    flops = 2 * 512 * 256 * 128
    assert product_flops(toy.by_name["z"], toy) == flops
    assert compute_seconds(toy.by_name["z"], toy, target) == pytest.approx(flops / (share * 1e6))
