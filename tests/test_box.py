"""The cluster in a box, as far as it can be tested without root: what it refuses, and its stand-ins for collectives."""

import os
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.measure.trace import TracedOperation
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import BATCH_AXES, Axis, make_mesh
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.curves import curve
from moe_jax.schedule.pipelines.build import make_table
from tests.parallel.per_device import on_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))  # its programs find each other there

import box
import exchange_summary
from box_summary import summary, table
from no_comm_variants import collectives_of, communication, without_communication
from pipeline_idle import bubble_of

from moe_jax import config

CORES = tuple(sorted(os.sched_getaffinity(0)))


def test_without_root_a_box_reports_that_it_needs_it(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    with pytest.raises(box.BoxError, match=r"needs root.*sudo"):
        box.run_in_box(box.Box(cores=CORES))


def test_without_tc_a_box_reports_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else program)
    with pytest.raises(box.BoxError, match=r"needs tc: install iproute2"):
        box.run_in_box(box.Box(cores=CORES))


@pytest.mark.parametrize("processes", [1, 5])
def test_a_box_has_two_to_four_processes(processes):
    with pytest.raises(box.BoxError, match=f"--processes={processes} must be 2..4"):
        box.Box(processes=processes, cores=CORES)


def test_a_core_that_is_not_there_is_refused():
    with pytest.raises(box.BoxError, match=r"--cores=100000 .* choose of"):
        box.Box(cores=(100_000,))


def test_rates_have_units():
    assert box.parse_rate("400mbit") == 400e6
    assert box.parse_rate("1.5gbit") == 1.5e9
    for text in ("fast", "400", "-1gbit", "1.2.3gbit", "mbit"):
        with pytest.raises(box.BoxError, match=f"--rate={text} must be"):
            box.parse_rate(text)


def body(x):
    def turn(x, _):
        return jax.lax.all_to_all(x, Axis.EXPERT, 0, 0, tiled=True), None

    x, _ = jax.lax.scan(turn, x, None, length=3)
    x = EXCHANGES["background"](x, Ranks(Axis.EXPERT, "cpu"))
    total, count = jax.lax.psum((x, jnp.int32(1)), BATCH_AXES)
    part = jax.lax.psum_scatter(total, Axis.EXPERT, tiled=True)
    return permuted(jax.lax.all_gather(part, Axis.EXPERT, tiled=True), Axis.DATA, [(0, 1), (1, 0)]) * count


def program():
    return on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4)


KINDS = ["all_to_all"] * 3 + ["host_call", "psum", "reduce_scatter", "all_gather", "ppermute"]


def test_every_collective_is_found_in_order_and_once_for_each_turn_of_a_loop():
    collectives = collectives_of(program().trace(jnp.ones((32, 8))).jaxpr)
    assert [collective.primitive.name for collective in collectives if collective.num_bytes > 4] == KINDS
    assert [collective.num_bytes for collective in collectives if collective.num_bytes > 4] == [128] * 6 + [32, 128]


def test_without_communication_no_collective_is_left_and_shapes_stay():
    with without_communication():
        alone = program()
        assert collectives_of(alone.trace(jnp.ones((32, 8))).jaxpr) == []
        assert alone(jnp.ones((32, 8))).shape == (32, 8)
    np.testing.assert_array_equal(program()(jnp.ones((32, 8))), 256.0)  # 8 devices · 4 ranks · 8 devices


@pytest.mark.parametrize(("columns", "few"), [(32, []), (8, ["psum"])])
def test_collectives_of_one_axis_can_be_kept_and_with_them_those_of_few_numbers(columns, few):
    """A device has four rows, and of what is summed over all devices and sent on, 64 numbers are few."""
    with without_communication(keep=Axis.EXPERT):
        kept = collectives_of(program().trace(jnp.ones((32, columns))).jaxpr)
    kinds = [each.primitive.name for each in kept if each.num_bytes > 4]
    assert kinds == ["all_to_all"] * 3 + few + ["reduce_scatter", "all_gather"] + (["ppermute"] if few else [])


def test_communication_alone_runs_the_same_collectives():
    collectives = collectives_of(program().trace(jnp.ones((32, 8))).jaxpr)
    again = communication(collectives, make_mesh(config.MeshConfig(data=2, expert=4)))
    found = collectives_of(again.trace().jaxpr)
    assert [(c.primitive, c.operands) for c in found] == [(c.primitive, c.operands) for c in collectives]
    assert np.isfinite(again())


def test_ratios_compare_runs_of_the_same_round():
    """The machine was half as fast in the second round; no ratio may show it."""
    seconds = {
        "vanilla": [4.0, 8.0],
        "unified": [2.0, 4.0],
        "compute alone: vanilla": [1.0, 2.0],
        "communication alone": [1.6, 3.2],
    }
    timelines = {
        "vanilla": [
            TracedOperation("a", "F.expert.0.0", False, "", 0.0, 1.0),
            TracedOperation("b", "B.combine.0.0", True, "", 1.0, 2.0),
        ],
        "unified": [
            TracedOperation("a", "G.reduce.0.0", True, "", 0.0, 4.0),
            TracedOperation("b", "F.expert.0.0", False, "", 1.0, 2.0),
            TracedOperation("c", "B.expert.0.0", False, "", 1.5, 3.0),
        ],
    }
    found = {"rate_mbit": 400.0, "task_times": {}, "seconds": seconds, "timelines": timelines}
    result = summary(found, {"vanilla": [], "unified": ["schedule.policy=unified"]})
    row = result["variants"]["unified"]
    assert row["speed_up_over_vanilla"] == {"median": 2, "first_quartile": 2, "third_quartile": 2}
    assert row["step_over_bound"]["median"] == 1.25
    assert row["step_s"] == {"median": 3, "first_quartile": 2.5, "third_quartile": 3.5}
    assert (row["exchanges_hidden"], row["gradient_sums_hidden"]) == (None, 0.5)
    assert result["variants"]["vanilla"]["exchanges_hidden"] == 0
    assert "unified" in table(result)


def test_processes_divide_over_nodes():
    nodes = {"ranks_per_node": 2, "node_bits_per_s": 1e8, "cores": CORES}
    assert box.Box(processes=4, **nodes).nodes == 2
    with pytest.raises(box.BoxError, match=r"--ranks-per-node=2 does not divide --processes=3: use 1 or a divisor"):
        box.Box(processes=3, **nodes)


@pytest.mark.parametrize("nodes", [{"ranks_per_node": 2}, {"node_bits_per_s": 1e8}])
def test_only_nodes_of_several_processes_have_a_link_of_their_own(nodes):
    with pytest.raises(box.BoxError, match=r"nodes of several processes, and no others, need a --rate"):
        box.Box(processes=4, cores=CORES, **nodes)


def exchange_curves(seconds_of):
    """The curves of all algorithms over four ranks, and of all collectives inside a node and between nodes."""
    groups = {(2, 1): "inside", (2, 2): "between", (4, 1): "all"}
    names = [*(f"all_to_all.{name}" for name in EXCHANGES), "permute", "all_gather"]
    sizes = [2.0**n for n in range(16, 20)]
    return [
        curve(
            name,
            {"ranks": ranks, "stride": stride},
            "bytes",
            sizes,
            [(s, s, s) for s in map(seconds_of(name, where), sizes)],
        )
        for (ranks, stride), where in groups.items()
        for name in names
    ]


def test_a_model_predicts_exchanges_from_collectives_inside_and_between_nodes():
    """Alpha 1 ms everywhere; 1 and 4 ns per byte of an operand of which half moves."""

    def seconds_of(name, where):
        beta = {"inside": 1e-9, "between": 4e-9, "all": 5e-9}[where]
        return lambda size: 1e-3 + size * beta * (0.5 if name.endswith("flat") else 1)

    result = exchange_summary.summary(exchange_curves(seconds_of))
    sizes = np.array(result["sizes_bytes"])
    expected = {
        "flat": 2e-3 + sizes * 2e-9,  # two messages of each rank, of a quarter: alpha twice that of one of a half
        "ring": 1e-3 + 2 * np.maximum(0.5e-3 + sizes / 4 * 2e-9, 1e-3 + sizes / 4 * 1e-9) + sizes / 4 * 4e-9,
        "hier_2d": 2e-3 + sizes * (0.5 + 2) * 1e-9,
        "halo": 2e-3 + sizes * (0.25 + 2) * 1e-9,
        "hier_1d": 2.5e-3 + sizes * (1 + 2 + 1) * 1e-9,
        "background": 2e-3 + sizes * 4e-9,
    }
    assert set(expected) == set(EXCHANGES)
    for name, seconds in expected.items():
        np.testing.assert_allclose(result["algorithms"][name]["predicted_s"], seconds, rtol=1e-3, err_msg=name)
    assert set(result["fastest"]) == {"flat"}
    assert result["chosen_by_model"] == ["flat"] * 4
    assert result["chosen_over_fastest"] == [1.0] * 4
    assert result["ahead_of_flat_as_measured"] == []
    assert result["ahead_of_flat_by_closed_forms"] == []
    assert {fit["where"] for fit in result["fits"]} == {"inside", "between", "all"}
    assert all(fit["r_squared"] == pytest.approx(1) for fit in result["fits"])


def test_an_algorithm_without_a_model_is_measured_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(exchange_summary, "ALGORITHMS", ("hier_2d",))

    def seconds_of(name, where):
        return lambda size: (1e-3 + size * 1e-9) * (0.9 if name.endswith("halo") else 1)

    result = exchange_summary.summary(exchange_curves(seconds_of))
    assert result["algorithms"]["halo"]["predicted_s"] is None
    assert set(result["fastest"]) == {"halo"}
    assert result["chosen_over_fastest"] == [1.0] * 4
    assert result["ahead_of_flat_as_measured"] == [f"halo at {2**n} bytes" for n in range(16, 20)]
    assert "(-)" in exchange_summary.table(result)
    assert exchange_summary.write_picture(result, tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def rank_of_pipeline(passes, late_s):
    """What ran on a rank: every tick begins with the same instruction, every pass an exchange between two products."""
    found = []
    for tick, (begin_s, task, start_s, end_s) in enumerate(passes):
        found.append(TracedOperation("begin", "", True, "", begin_s, begin_s))
        middle_s = (start_s + end_s) / 2
        for number, (start, end) in enumerate([(start_s, middle_s - 0.1), (middle_s + 0.1, end_s)]):
            if task:
                found.append(
                    TracedOperation(f"dot.{tick}.{number}", f"{task}.attention.0", False, "", start + late_s, end)
                )
    return [*found, TracedOperation("adam", "", False, "", 6.5, 7.0)]


def test_a_stage_is_idle_while_no_rank_of_it_has_a_pass():
    """One microbatch, two stages: F takes a second, B two, what is sent arrives at once. Half of the time is idle."""
    first = [(0, "F", 0, 1), (1, "", 0, 0), (2, "", 0, 0), (4, "B", 4, 6)]
    last = [(0, "", 0, 0), (1, "F", 1, 2), (2, "B", 2, 4), (4, "", 0, 0)]
    ranks = [rank_of_pipeline(passes, late_s) for passes in (first, last) for late_s in (0.0, 0.2)]
    found = bubble_of(ranks, make_table("gpipe", 2, 1), send_s=0.5)
    assert found == pytest.approx(
        {"measured": 0.5, "formula": 0.5, "own_slots": 0.5, "own_slots_and_sends": 1 - 6 / 14, "F_s": 1, "B_s": 2}
    )
