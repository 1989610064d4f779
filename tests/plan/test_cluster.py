"""Cluster profiles as files: what is written is read, and damage is reported."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_jax.plan.clusters.measured import ClusterProfile, ProfileError, read_profile, write_profile
from moe_jax.plan.curves import curve


def profile() -> ClusterProfile:
    times = [(0.9e-3, 1e-3, 1.2e-3), (1.8e-3, 2e-3, 2.2e-3)]
    return ClusterProfile(
        platform="cpu",
        devices=4,
        processes=2,
        node_devices=2,
        curves=(
            curve("permute", {"ranks": 2, "stride": 1}, "bytes", [1024, 4096], times),
            curve("permute", {"ranks": 2, "stride": 2}, "bytes", [1024, 4096], times),
            curve("copy", {}, "bytes", [1024, 4096], times),
        ),
        provenance={"date": "2026-01-01"},
        memory_bytes=8 * 10**9,
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    write_profile(path, profile())
    assert read_profile(path) == profile()
    assert [each.name for each in path.parent.iterdir()] == ["box.json"]


def test_a_file_without_memory_is_read(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    write_profile(path, profile())
    found = json.loads(path.read_text())
    assert found.pop("memory_bytes") == 8 * 10**9
    path.write_text(json.dumps(found))
    assert read_profile(path) == dataclasses.replace(profile(), memory_bytes=None)


def test_a_curve_is_found_by_its_settings() -> None:
    assert profile().find("permute", ranks=2, stride=2) is not profile().curves[0]
    assert profile().find("permute", ranks=2, stride=2).settings["stride"] == 2
    assert profile().find("copy").seconds(1024) == 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "others"),
    [
        ("permute", {"ranks": 8, "stride": 1}, "permute ranks=2 stride=1, permute ranks=2 stride=2"),
        ("matmul", {"width": 64}, "its other operations"),
    ],
)
def test_a_curve_that_is_not_there_is_reported_with_those_that_are(name: str, settings: dict, others: str) -> None:
    with pytest.raises(ProfileError, match=f"the cluster profile has no {name} .*: measure it, or use one of {others}"):
        profile().find(name, **settings)


def _curve(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda found: change(found["curves"][1])


DAMAGE = {
    "it wants platform, devices, processes, node_devices, curves, provenance, memory_bytes": lambda found: found.pop(
        "curves"
    ),
    "devices is not a whole number above 0": lambda found: found.update(devices=0),
    "platform is not tpu, gpu or cpu": lambda found: found.update(platform="fpga"),
    "processes is not a whole number above 0": lambda found: found.update(processes=True),
    "node_devices is not a whole number above 0": lambda found: found.update(node_devices=1.5),
    "memory_bytes is not a whole number above 0, or null": lambda found: found.update(memory_bytes=-1),
    "curves is not a list": lambda found: found.update(curves={}),
    "curves\\[0\\]: it is no JSON object": lambda found: found["curves"].insert(0, 3),
    "curves\\[1\\]: it wants name, settings": _curve(lambda each: each.pop("alpha_s")),
    "curves\\[1\\]: unit is not bytes or flops": _curve(lambda each: each.update(unit="tokens")),
    "curves\\[1\\]: settings is not an object": _curve(lambda each: each.update(settings={"ranks": "2"})),
    "curves\\[1\\]: settings of a collective are 2 ranks or more, and a stride": _curve(
        lambda each: each.update(name="all_to_all.flat", settings={"ranks": 1, "stride": 1})
    ),
    "curves\\[1\\]: amounts is not a list of two or more growing": _curve(lambda each: each["amounts"].reverse()),
    "curves\\[1\\]: median_s is not as long as amounts": _curve(lambda each: each["median_s"].pop()),
    "curves\\[1\\]: efficiency is not a list": _curve(lambda each: each["efficiency"].__setitem__(0, -1)),
    "curves\\[1\\]: beta_s is not a number from 0 up": _curve(lambda each: each.update(beta_s=float("nan"))),
    "curves\\[1\\]: r_squared is not a number": _curve(lambda each: each.update(r_squared=None)),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_damage_is_reported_in_one_line(problem: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    write_profile(path, profile())
    found = json.loads(path.read_text())
    DAMAGE[problem](found)
    path.write_text(json.dumps(found))
    with pytest.raises(ProfileError, match=f"box.json is damaged \\({problem}.*make it again") as reported:
        read_profile(path)
    assert "\n" not in str(reported.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file or directory"), ("{", "it is no JSON"), (b"\xff", "it is no JSON")]
)
def test_a_file_that_is_no_profile(content: str | bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProfileError, match=f"box.json cannot be read \\({reason}\\): make one with python -m"):
        read_profile(path)


def test_a_file_that_holds_something_else(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text("[]")
    with pytest.raises(ProfileError, match="it is no JSON object"):
        read_profile(path)
