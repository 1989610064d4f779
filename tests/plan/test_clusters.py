"""Clusters by name: sizes that exist, links that reach, and one line for what does not exist."""

import dataclasses
from pathlib import Path

import pytest

from moe_jax.config.draft import open_draft
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import UserError
from moe_jax.measure.targets import find_target
from moe_jax.plan.clusters import PRESETS, LinkCurve, cluster_of, find_cluster
from moe_jax.plan.clusters.measured import ClusterProfile, write_profile
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.curves import Curve, curve
from moe_jax.plan.estimate import estimate
from moe_jax.plan.planner import plan


@pytest.mark.parametrize("kind", [kind for kind in PRESETS if kind != "cpu"])
def test_every_preset_grows_from_one_device_to_many_nodes(kind: str) -> None:
    unit = PRESETS[kind].unit
    for count in (1, unit, 2 * unit, 64 * unit):
        for joint in "-x":
            cluster = find_cluster(f"{kind}{joint}{count}")
            assert cluster.devices == cluster.levels[-1].devices == count
        reach = [level.devices for level in cluster.levels]
        assert reach == sorted(set(reach))
        rates = [level.bytes_per_s * level.ring.efficiency for level in cluster.levels]
        assert rates == sorted(rates, reverse=True), "links beyond a node are no faster"
        assert cluster.watts is not None
        assert cluster.device.memory_bytes


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("h100x64", [("NVLink", 8), ("InfiniBand", 64)]),
        ("h100x4", [("NVLink", 4)]),
        ("v5px6144", [("ICI", 6144)]),
        ("v5p-12288", [("ICI", 6144), ("DCN", 12288)]),
        ("4xv5e-64", [("ICI", 64), ("DCN", 256)]),
        ("tpu7x-64", [("ICI", 64)]),
        ("rtx3090x16", [("PCIe", 8), ("InfiniBand", 16)]),
        ("mi250x-2048", [("Infinity Fabric", 8), ("Slingshot", 1024), ("Slingshot between groups", 2048)]),
    ],
)
def test_levels_join_nodes_slices_and_all(name: str, groups: list[tuple[str, int]]) -> None:
    cluster = find_cluster(name)
    assert [(level.name, level.devices) for level in cluster.levels] == groups
    assert cluster.level(2).name == groups[0][0]
    assert cluster.level(cluster.devices).name == groups[-1][0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "cluster h100 does not say how many devices: add a number, as in h100-64"),
        ("4xv5e", "cluster 4xv5e does not say how many devices: add a number, as in 4xv5e-32"),
        ("h10x64", "cluster 'h10x64' is unknown: did you mean h100-64?"),
        ("H100x8", "cluster 'H100x8' is unknown: did you mean h100-8?"),
        ("v5-8", "cluster 'v5-8' is unknown: did you mean v5p-8?"),
        ("toaster", "cluster 'toaster' is unknown: use one of v4, v5e, v5p, v6e, tpu7x, a100,"),
        ("h100x0", "cluster h100x0 has no devices: use 1 or more"),
        ("0xv5e-8", "cluster 0xv5e-8 has no devices"),
        ("h100x12", "cluster h100x12: 12 devices are no whole nodes of 8: use 8 or 16"),
        ("v5p-6", "cluster v5p-6: 6 devices are no whole hosts of 4: use 4 or 8"),
        ("v5e-260", "cluster v5e-260: 260 devices are no 2 equal slices of at most 256: use 512"),
        ("", "cluster '' is unknown: use one of v4,"),
        (f"h100x{'9' * 5000}", f"cluster h100x{'9' * 5000} has too many devices: use up to 1,048,576"),
        ("1024xv5p-2048", "cluster 1024xv5p-2048 has too many devices"),
        ("v5p-3", "cluster v5p-3: slices of TPU v5p have 1, 2, 4, 8, 16, 32 or a multiple of 64 devices: use 2 or 4"),
        ("v5p-20", "cluster v5p-20: slices of TPU v5p have 1, 2, 4, 8, 16, 32 or a multiple of 64 devices: use 16 or"),
        ("v5p-8000", "cluster v5p-8000: slices of TPU v5p have 1, 2, 4, 8, 16, 32 or a multiple of 64 devices: use 79"),
        ("4xv5e-12", "cluster 4xv5e-12: slices of TPU v5e have 1, 2, 4, 8, 16, 32, 64, 128 or a multiple of 256"),
        ("2xv5e-512", "cluster 2xv5e-512: the largest slice has 256 devices"),
        ("2xh100-8", "cluster 2xh100-8: H100 SXMs come in nodes, not in slices: leave out 2x"),
        ("no/such.json", "cluster profile no/such.json cannot be read"),
    ],
)
def test_what_does_not_exist_is_reported_with_a_cure(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        find_cluster(name)
    assert str(error.value).startswith(message)


def test_an_all_to_all_over_more_of_a_torus_is_slower_for_each_device() -> None:
    """4·4·4 v5p chips without wrap-around: half of all bytes cross 16 links of 100 GB/s."""
    level = find_cluster("v5p-6144").level(64)
    num_bytes = 1e9
    crossing = 64 * num_bytes * (64 / 63) / 4 / 16 / (100e9 * level.ring.efficiency)
    ramp_s = 2 * (level.ring.ramp_s * crossing) ** 0.5
    assert level.exchange_seconds(num_bytes, 64) == pytest.approx(level.ring.alpha_s + crossing + ramp_s)
    rates = [1 / level.exchange(ranks).beta_s for ranks in (8, 64, 512)]
    assert rates == sorted(rates, reverse=True)
    assert 1 / level.line.beta_s > rates[0]
    whole = find_cluster("v5p-64").levels[0]
    assert whole.exchange(64).beta_s == pytest.approx(level.exchange(64).beta_s / 2), (
        "a whole torus has twice the links"
    )


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    # of six links of 100 GB/s, as many as a chip has neighbours: one, two in a square, three in a cube; all in a torus
    [
        ("v5p-2", 100),
        ("v5p-4", 200),
        ("v5p-8", 300),
        ("v5p-32", 300),
        ("v5p-64", 600),
        ("tpu7x-8", 100),
        ("v5e-4", 100),
    ],
)
def test_chips_of_small_slices_have_fewer_links(name: str, gb_per_s: float) -> None:
    assert find_cluster(name).levels[0].bytes_per_s == pytest.approx(1e9 * gb_per_s)


def test_messages_of_middle_size_ramp_up_and_many_nodes_congest() -> None:
    """Twice the geometric mean of the ramp and of the time at the rate; 4 % of the rate for each doubling of nodes."""
    line = LinkCurve(1e-5, 0.5, 4e-6)
    level = dataclasses.replace(find_cluster("h100x8").levels[0], bytes_per_s=2e9, ring=line, all_to_all=None)
    assert level.line.seconds(1e6) == pytest.approx(1e-5 + 1e-3 + 2 * (4e-6 * 1e-3) ** 0.5)
    assert level.line.seconds(1e6, parts=2) == level.line.seconds(5e5)
    cluster = find_cluster("h100x512")
    near, far = (cluster.level(devices).bytes_per_s for devices in (16, 512))
    assert near == 50e9
    assert near / far == pytest.approx(1 + 5 * cluster.levels[1].congestion)


@pytest.mark.parametrize(
    ("target", "gb_per_s", "network"), [("v5p:2x2x2", 300, 300), ("v6e:2x4", 200, 200), ("h100:1x8x8", 450, 50)]
)
def test_targets_of_compilers_have_the_rates_of_presets(target: str, gb_per_s: float, network: float) -> None:
    found = find_target(target)
    assert found.matrix_flops_per_s == PRESETS[found.kind].device.matrix_flops_per_s
    assert [1e-9 / link.beta_s for link in (found.link, found.network)] == pytest.approx([gb_per_s, network])


def measured(node_devices: int) -> ClusterProfile:
    def times(*seconds: float) -> list[tuple[float, float, float]]:
        return [(each, each, each) for each in seconds]

    return ClusterProfile(
        platform="cpu",
        devices=4,
        processes=2,
        node_devices=node_devices,
        curves=(
            curve("all_to_all.flat", {"ranks": 2, "stride": 1}, "bytes", [1e6, 4e6], times(1e-3, 4e-3)),
            curve("all_to_all.flat", {"ranks": 4, "stride": 1}, "bytes", [1e6, 4e6], times(6e-3, 24e-3)),
            curve("all_to_all.flat", {"ranks": 2, "stride": 2}, "bytes", [1e6, 4e6], times(5e-3, 20e-3)),
            curve("matmul", {"width": 64}, "flops", [1e6, 1e9], times(1e-3, 1e-2)),
            curve("copy", {}, "bytes", [1e6, 4e6], times(1e-3, 4e-3)),
        ),
        provenance={"devices": "4 × cpu"},
        memory_bytes=10**9,
    )


def test_a_profile_is_a_cluster_whose_curves_replace_rates(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    write_profile(path, measured(node_devices=2))
    cluster = find_cluster(str(path))
    assert (cluster.devices, cluster.node_devices, cluster.device.name) == (4, 2, "4 × cpu")
    assert cluster.device.matrix_flops_per_s == pytest.approx(1e11)
    assert cluster.device.memory_bytes_per_s == pytest.approx(2e9)
    assert cluster.device.memory_bytes == 10**9
    assert cluster.watts is None
    collectives = CollectiveCosts(cluster)
    for ranks, stride, seconds in ((2, 1, 1e-3), (4, 1, 6e-3), (2, 2, 5e-3)):
        assert collectives.exchange(1e6, DeviceGroup(ranks, stride)).seconds == pytest.approx(seconds)
    # without a measured sum lines are made of the exchanges: between nodes of devices that share none
    assert collectives.ring(1e6, DeviceGroup(2, 2)) == pytest.approx(1e-2)


def test_a_search_runs_on_a_profile(tmp_path: Path) -> None:
    """Whose device, with its curves, is a key of caches."""
    write_profile(tmp_path / "box.json", measured(node_devices=2))
    base = load_config(None, ["model.num_layers=1", "data.seq_len=16", "train.batch_size=8"])
    plans = plan(open_draft(base), find_cluster(str(tmp_path / "box.json")))
    assert plans.best.estimate.step_s == estimate(plans.config, plans.cluster).step_s
    faster = dataclasses.replace(
        plans.cluster, device=dataclasses.replace(plans.cluster.device, curves=(_matmul(2.0),))
    )
    assert estimate(plans.config, faster).busy.compute < plans.best.estimate.busy.compute, "not the cached one"


def _matmul(speed: float) -> Curve:
    return curve("matmul", {"width": 64}, "flops", [1e6, 1e9], [(each / speed,) * 3 for each in (1e-3, 1e-2)])


def test_a_profile_that_lacks_something_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    for dropped in ("all_to_all.flat", "matmul", "copy"):
        whole = measured(node_devices=1)
        write_profile(
            path, dataclasses.replace(whole, curves=tuple(each for each in whole.curves if each.name != dropped))
        )
        with pytest.raises(UserError, match=f"but no {dropped}"):
            find_cluster(str(path))


@pytest.mark.parametrize(
    ("kind", "slices", "name"),
    [
        ("TPU v4", 1, "v4x16"),
        ("TPU v5 lite", 2, "2xv5e-8"),
        ("TPU v5", 1, "v5px16"),
        ("TPU v6 lite", 1, "v6ex16"),
        ("TPU7x", 1, "tpu7xx16"),
        ("NVIDIA H100 80GB HBM3", 1, "h100x16"),
        ("NVIDIA A100-SXM4-80GB", 1, "a100x16"),
        ("NVIDIA GeForce RTX 3090", 1, "rtx3090x16"),
        ("cpu", 1, "cpux16"),
    ],
)
def test_devices_are_known_by_what_jax_calls_them(kind: str, slices: int, name: str) -> None:
    assert cluster_of(kind, 16, slices) == find_cluster(name)


def test_unknown_devices_are_reported_with_a_cure() -> None:
    with pytest.raises(UserError, match="nothing is known of NVIDIA A100-SXM4-40GB: name a preset"):
        cluster_of("NVIDIA A100-SXM4-40GB", 8)
