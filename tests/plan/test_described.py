"""Clusters that YAML files describe, and nodes that only differ by their network."""

from pathlib import Path

import pytest

from moe_jax.errors import UserError
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.clusters.tpu import CORES

LEVELS = "[{name: NVLink, devices: 8, gb_per_s: 450, alpha_us: 15}, {name: rail, devices: 64, gb_per_s: 50}]"
OWN = "{memory_gb: 80, tflops: 989, memory_gb_per_s: 3350}"


def described(folder: Path, text: str) -> Path:
    file = folder / "site.yaml"
    file.write_text(text)
    return file


def test_a_file_describes_devices_and_levels_of_links(tmp_path: Path) -> None:
    cluster = find_cluster(
        str(described(tmp_path, f"devices: 64\nranks_per_adapter: 2\ndevice: {OWN}\nlevels: {LEVELS}"))
    )
    assert (cluster.devices, cluster.node_devices, cluster.ranks_per_adapter) == (64, 8, 2.0)
    assert (cluster.device.memory_bytes, cluster.device.matrix_flops_per_s) == (80 * 10**9, 989e12)
    assert cluster.device.dollars_per_hour is None
    assert [level.name for level in cluster.levels] == ["NVLink", "rail"]
    assert cluster.level(8).bytes_per_s == 450e9
    assert cluster.level(8).ring.alpha_s == pytest.approx(15e-6)


def test_a_file_changes_the_device_of_a_preset(tmp_path: Path) -> None:
    text = f"base: h100\ndevices: 64\ndevice: {{dollars_per_hour: 1.9}}\nlevels: {LEVELS}"
    found, preset = find_cluster(str(described(tmp_path, text))).device, find_cluster("h100x1").device
    assert (found.dollars_per_hour, found.matrix_flops_per_s) == (1.9, preset.matrix_flops_per_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "the file must be a section with base, devices, ranks_per_adapter, device, levels"),
        (f"base: h100\ndevices: 64\nlevel: {LEVELS}", "the file has level: did you mean levels?"),
        ("base: h100\ndevices: 64", "levels must be a list of 1 to 16 sections with name, devices, gb_per_s,"),
        (f"base: h10\ndevices: 64\nlevels: {LEVELS}", "base=h10 is not a preset: use one of v4, "),
        (f"base: [h100]\ndevices: 64\nlevels: {LEVELS}", "base=['h100'] is not a preset: use one of v4, "),
        (f"base: h100\ndevices: 64\ndevice: 0\nlevels: {LEVELS}", "device must be a section with memory_gb, tflops,"),
        (f"devices: 64\nlevels: {LEVELS}", "device has no memory_gb: give it, or base with a preset"),
        (f"base: h100\ndevices: 0\nlevels: {LEVELS}", "devices=0 must be a whole number from 1 to 1,048,576"),
        (f"base: h100\ndevices: 32\nlevels: {LEVELS}", "rail joins 64 of devices=32: use 32"),
        (
            f"base: h100\ndevices: 12\nlevels: {LEVELS.replace('64', '12')}",
            "rail joins 12 devices, and NVLink 8: use a multiple of 8, e.g. 16",
        ),
        (
            "base: h100\ndevices: 8\nlevels: [{devices: 8, gb_per_s: -1}]",
            "levels[0].gb_per_s=-1 must be a number above 0",
        ),
        (
            f"base: h100\ndevices: 8\nlevels: [{{devices: 8, gb_per_s: 1{400 * '0'}}}]",
            "levels[0].gb_per_s=1000",
        ),
        ("base: h100\ndevices: 8\nlevels: [{devices: 8}]", "levels[0].gb_per_s=None must be a number above 0"),
        (
            "base: h100\ndevices: 8\nlevels: [{devices: 8, gb_per_s: 9, efficiency: 2}]",
            "levels[0].efficiency=2 must be a",
        ),
        (
            "base: h100\ndevices: 8\nlevels: [{devices: 8, gb_per_s: 1.0e-300}]",
            "levels[0].gb_per_s=1e-300 must be at least 1e-06",
        ),
        (
            "base: h100\ndevices: 8\nlevels: [{devices: 8, gb_per_s: 9, name: ''}]",
            "levels[0].name= must be a text, e.g. NVLink",
        ),
        (
            f"base: h100\ndevices: 64\nranks_per_adapter: 0.5\nlevels: {LEVELS}",
            "ranks_per_adapter=0.5 must be at least 1, which shares no adapter",
        ),
    ],
)
def test_what_describes_no_cluster_is_refused_with_a_cure(text: str, message: str, tmp_path: Path) -> None:
    file = described(tmp_path, text)
    with pytest.raises(UserError) as error:
        find_cluster(str(file))
    assert str(error.value).startswith(f"cluster file {file}: {message}")


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^cluster file no/site\.yaml cannot be read \(.*\): name a YAML file$"):
        find_cluster("no/site.yaml")


@pytest.mark.parametrize(
    ("name", "groups", "sharing"),
    [
        ("a800x16", [("NVLink", 8), ("InfiniBand", 16)], 1.0),
        ("h800x2048", [("NVLink", 8), ("InfiniBand", 2048)], 1.0),
        ("gb200x72", [("NVLink", 72)], 1.0),
        ("gb300x512", [("NVLink", 64), ("InfiniBand", 512)], 1.0),
        ("gb200x1000", [("NVLink", 40), ("InfiniBand", 1000)], 1.0),
        ("v100x8", [("NVLink", 8)], 2.0),
        ("mi300x8", [("Infinity Fabric", 8)], 1.0),
        ("mi300x-16", [("Infinity Fabric", 8), ("InfiniBand", 16)], 1.0),
        ("p4dex16", [("NVLink", 8), ("EFA", 16)], 2.0),
        ("p3dn-16", [("NVLink", 8), ("EFA", 16)], 8.0),
    ],
)
def test_users_names_are_known(name: str, groups: list[tuple[str, int]], sharing: float) -> None:
    cluster = find_cluster(name)
    assert [(level.name, level.devices) for level in cluster.levels] == groups
    assert cluster.ranks_per_adapter == sharing


def test_chips_with_two_cores_are_those_that_googles_names_count_twice() -> None:
    assert {find_cluster(f"{name}-64").device.name for name in ("v4", "v5p")} == set(CORES)
