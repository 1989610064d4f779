"""The microbenchmarks: what their programs move, how samples become curves, and the command on simulated devices.

No test looks at how long anything takes.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moe_jax.measure.microbench import BenchmarkProgram, DeviceOperands, compile_all, curves_of, memory_bytes, times_of
from moe_jax.measure.operations import KINDS, QUICK, CommGroup, Machine, collectives, groups_of, operations
from moe_jax.parallel import background
from moe_jax.parallel.all_to_all import BY_NODE, EXCHANGES
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.clusters.measured import ClusterProfile, read_profile
from moe_jax.report.plots import PlotError
from moe_jax.report.profile import draw_profile

FLOAT32 = jnp.dtype(jnp.float32)
MACHINE = Machine("cpu", node_devices=2)
GROUPS = [CommGroup(4, 1), CommGroup(2, 4), CommGroup(8, 1)]
ROOT = Path(__file__).parents[2]


def programs_of(group: CommGroup) -> dict[str, BenchmarkProgram]:
    return {each.operation.name: each for each in compile_all(collectives(group, 256, MACHINE, FLOAT32), FLOAT32)}


def run_once(program: BenchmarkProgram, x: np.ndarray) -> np.ndarray:
    background.connect(program.mesh)
    placed = jax.device_put(x.astype(np.float32), NamedSharding(program.mesh, BATCH_SPEC))
    return np.asarray(program.compiled(np.int32(1), placed))


def members(group: CommGroup) -> np.ndarray:
    """[group, rank], as numbers of devices."""
    devices = np.arange(8)
    return devices.reshape(-1, group.ranks) if group.stride == 1 else devices.reshape(group.ranks, -1).T


@pytest.mark.parametrize("group", GROUPS)
def test_every_exchange_is_there_and_exchanges_between_the_ranks_of_its_group(group: CommGroup) -> None:
    programs = programs_of(group)
    part = 256 // 4 // group.ranks
    sent = np.zeros((8, group.ranks, part))
    expected = np.zeros_like(sent)
    for each in members(group):
        for i, source in enumerate(each):
            for j, target in enumerate(each):
                sent[source, j] = expected[target, i] = 8 * source + target
    several_nodes = group.stride == 1
    names = [name for name in EXCHANGES if several_nodes or name not in BY_NODE]
    assert [name for name in programs if name.startswith("all_to_all.")] == [f"all_to_all.{name}" for name in names]
    for name in names:
        arrived = run_once(programs[f"all_to_all.{name}"], sent.reshape(-1, part))
        np.testing.assert_array_equal(arrived.reshape(sent.shape), expected, err_msg=name)


@pytest.mark.parametrize(("platform", "there"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_only_cpus_exchange_in_the_background(platform: str, there: bool) -> None:
    found = {each.name for each in collectives(GROUPS[0], 256, Machine(platform, node_devices=2), FLOAT32)}
    assert ("all_to_all.background" in found) == there
    assert {f"all_to_all.{name}" for name in EXCHANGES} - {"all_to_all.background"} <= found


@pytest.mark.parametrize("group", GROUPS)
def test_other_collectives_bring_their_first_number_from_their_group(group: CommGroup) -> None:
    programs = programs_of(group)
    first = {}
    for name in ("reduce_scatter", "all_reduce", "permute", "all_gather"):
        (elements,) = programs[name].operation.shape
        sent = np.repeat(np.arange(8), elements)
        first[name] = run_once(programs[name], sent).reshape(8, elements)[:, 0]
    for each in members(group):
        np.testing.assert_array_equal(first["all_reduce"][each], each.sum())
        np.testing.assert_array_equal(first["reduce_scatter"][each], each.sum())
        np.testing.assert_array_equal(first["all_gather"][each], each[0])
        np.testing.assert_array_equal(first["permute"][each], np.roll(each, 1))


def test_operands_are_as_large_as_their_name_states() -> None:
    for program in programs_of(CommGroup(4, 1)).values():
        held = 4 * np.prod(program.operation.shape)
        assert held * (4 if program.operation.name == "all_gather" else 1) == program.operation.amount


def test_sizes_are_rounded_up_to_equal_parts() -> None:
    assert {each.amount for each in collectives(CommGroup(3, 1), 256, MACHINE, FLOAT32)} == {264}


def test_ranks_that_share_a_node() -> None:
    assert [group.per_node(4) for group in (CommGroup(8, 1), CommGroup(4, 1), CommGroup(2, 1))] == [4, 4, 2]
    assert [group.per_node(4) for group in (CommGroup(4, 2), CommGroup(2, 4))] == [2, 1]


def test_groups_cover_every_size_of_neighbours_and_every_stride() -> None:
    assert groups_of(8) == [CommGroup(2, 1), CommGroup(4, 1), CommGroup(8, 1), CommGroup(4, 2), CommGroup(2, 4)]
    assert groups_of(1) == []


def test_a_product_repeated_often_neither_grows_nor_fades() -> None:
    """Else a benchmark would end in numbers that are slow to compute with."""
    sizes = QUICK._replace(tokens=(8,), widths=(64,))
    for program in compile_all(operations(["matmul"], sizes, [], MACHINE, FLOAT32), FLOAT32):
        operands = DeviceOperands(FLOAT32)
        operands.seconds(program, 1)
        (once,) = operands.operands.values()
        sums = np.asarray(once).sum(axis=1)
        operands.seconds(program, 5000)
        (often,) = operands.operands.values()
        np.testing.assert_allclose(np.asarray(often).sum(axis=1), sums, rtol=1e-3)


def test_each_round_runs_everything_and_curves_have_all_sizes() -> None:
    programs = compile_all(operations(KINDS, QUICK, [CommGroup(4, 1)], MACHINE, FLOAT32), FLOAT32)
    reported: list[str] = []
    times = times_of(programs, FLOAT32, rounds=2, round_s=0.0, report=reported.append)
    assert reported == ["round 1 of 2", "round 2 of 2"]
    assert {len(each) for each in times} == {2}
    curves = curves_of([program.operation for program in programs], times)
    sizes = Counter(each.name for each in curves)
    assert sizes == {
        **{f"all_to_all.{name}": 1 for name in EXCHANGES},
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "permute", "copy"), 1),
        "matmul": 2,
        "matmul.skinny": 1,
        "attention": 2,
    }
    for each in curves:
        assert each.amounts == tuple(sorted(each.amounts))
        assert len(each.amounts) == (3 if each.unit == "bytes" else 2)
        assert max(each.efficiency) == 1.0


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_writes_a_profile_and_a_plot_on_simulated_devices(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "two.json"
    output = command("moe_jax.measure", "--cpu-devices", "2", "--quick", "--rounds", "2", "--out", str(path))
    profile = read_profile(path)
    assert (profile.platform, profile.devices, profile.processes, profile.node_devices) == ("cpu", 2, 1, 2)
    assert profile.memory_bytes is None, "CPUs do not report"
    assert profile.provenance["command"].startswith("python -m moe_jax.measure --cpu-devices 2")
    assert {each.name.partition(".")[0] for each in profile.curves} == {
        *("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "permute", "matmul", "attention", "copy")
    }
    assert profile.find("all_to_all.flat", ranks=2, stride=1).seconds(1e6) > 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert output.endswith(f"written: {path}\nwritten: {path.with_suffix('.png')}\n")


def test_two_processes_measure_together_and_one_of_them_writes(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    launch = ("moe_jax.launch", "--processes", "2", "--module", "moe_jax.measure")
    output = command(
        *launch, "--cpu-devices", "4", "--quick", "--rounds", "1", "--only", "collectives", "--out", str(path)
    )
    profile = read_profile(path)
    assert (profile.devices, profile.processes, profile.node_devices) == (4, 2, 2)
    assert {(each.settings["ranks"], each.settings["stride"]) for each in profile.curves} == {(2, 1), (4, 1), (2, 2)}
    assert any(each.name == "all_to_all.hier_2d" for each in profile.curves), "two nodes of two"
    assert output.count("written:") == 2
    assert {each.name for each in tmp_path.iterdir()} == {"two.json", "two.png"}


def test_memory_is_that_of_the_smallest_device_if_all_report_it() -> None:
    def device(stats: dict[str, int] | None) -> Any:
        return SimpleNamespace(memory_stats=lambda: stats)

    large, small, other = ({"bytes_limit": 9, "bytes_in_use": 1}, {"bytes_limit": 5}, {"bytes_in_use": 1})
    assert memory_bytes([device(large), device(small)]) == 5
    assert memory_bytes([device(large), device(other)]) is None
    assert memory_bytes([device(None)]) is memory_bytes(jax.local_devices()) is None


def test_without_matplotlib_the_plot_reports_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    empty = ClusterProfile(platform="cpu", devices=1, processes=1, node_devices=1, curves=(), provenance={})
    with pytest.raises(PlotError, match=r"pip install -e '.\[plots\]'"):
        draw_profile(empty, tmp_path / "plot.png")
