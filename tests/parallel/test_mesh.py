"""Mesh sizes: -1 is resolved, wrong products are refused with a cure that works."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from moe_jax.config import MeshConfig
from moe_jax.errors import MeshError
from moe_jax.parallel.mesh import Axis, batch_shards, make_mesh, mesh_sizes


@pytest.mark.parametrize(
    ("settings", "data", "expert"),
    [
        (MeshConfig(), 8, 1),
        (MeshConfig(expert=4), 2, 4),
        (MeshConfig(data=2, expert=-1), 2, 4),
        (MeshConfig(data=4, expert=2), 4, 2),
    ],
)
def test_sizes(settings, data, expert):
    sizes = mesh_sizes(settings, 8)
    assert (sizes[Axis.DATA], sizes[Axis.EXPERT]) == (data, expert)
    assert batch_shards(make_mesh(settings)) == 8


def test_every_axis_has_a_setting():
    assert set(MeshConfig().sizes) == set(Axis)


WRONG = [
    *(MeshConfig(data=3), MeshConfig(expert=3), MeshConfig(data=2, expert=2), MeshConfig(data=1, expert=16)),
    *(
        MeshConfig(tensor=3),
        MeshConfig(tensor=16),
        MeshConfig(expert=4, tensor=6),
        MeshConfig(expert=8, tensor=2),
        MeshConfig(data=3, tensor=-1),
    ),
    MeshConfig(pipeline=3, expert=2),
    MeshConfig(data=1, pipeline=2, context=8),
]


@pytest.mark.parametrize("settings", WRONG)
def test_wrong_products_name_a_cure_that_works(settings):
    with pytest.raises(MeshError) as error:
        mesh_sizes(settings, 8)
    changes = dict(re.findall(r"mesh\.(\w+)=(-?\d+)", str(error.value).split("use ")[1]))
    cured = settings.sizes | {name: int(size) for name, size in changes.items()}
    assert mesh_sizes(MeshConfig(**cured), 8)


def test_a_lone_device_may_be_simulated_as_many():
    for settings in (MeshConfig(expert=4), MeshConfig(data=1, expert=4)):
        with pytest.raises(MeshError, match=r"expert=4 = 4, but there is one device: use mesh.cpu_devices=4 to simul"):
            mesh_sizes(settings, 1)
    assert mesh_sizes(MeshConfig(expert=4), 4)
    assert mesh_sizes(MeshConfig(), 1)


def test_neighbours_along_the_expert_axis_are_neighbouring_devices():
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    ids = [device.id for device in mesh.devices.flatten()]
    assert ids == sorted(ids)
    assert mesh.axis_names.index(Axis.EXPERT) > mesh.axis_names.index(Axis.DATA)


@pytest.mark.parametrize("error", [NotImplementedError("Failed to find assignment"), AssertionError("TpuDevice")])
def test_axes_that_do_not_follow_the_links_of_tpus_are_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("jax.experimental.mesh_utils.create_device_mesh", refuse)
    with pytest.raises(MeshError, match=r"^mesh: expert=8 cannot be laid along the links of these 8 devices: use "):
        make_mesh(MeshConfig(expert=8))


@dataclass(frozen=True, eq=False)  # by identity, also next to real devices
class Device:
    """A device as the placement on a mesh reads it."""

    id: int
    slice_index: int
    coords: tuple[int, ...] = (0, 0, 0)
    platform: str = "tpu"
    device_kind: str = "TPU v5p"
    core_on_chip: int = 0
    process_index: int = 0
    __class__ = property(lambda self: jax.Device)  # for checks of types


def slices_of_tpus(count: int, sides: tuple[int, int, int], kind: str = "TPU v5p") -> list[Any]:
    """Devices of slices, those of different slices interleaved."""
    places = [place[::-1] for place in itertools.product(*map(range, sides[::-1]))]
    placed = [(part, place) for place in places for part in range(count)]
    return [Device(number, part, place, device_kind=kind) for number, (part, place) in enumerate(placed)]


def along(mesh: jax.sharding.Mesh, axis: Axis) -> np.ndarray:
    """The devices of a mesh, one line along an axis in each row."""
    place = mesh.axis_names.index(axis)
    return np.moveaxis(mesh.devices, place, -1).reshape(-1, mesh.devices.shape[place])


@pytest.mark.parametrize(
    ("settings", "crossing"),
    [
        (MeshConfig(data=4, expert=8), {Axis.DATA}),
        (MeshConfig(data=2, expert=4, pipeline=2, tensor=2), {Axis.DATA, Axis.PIPELINE}),
        (MeshConfig(data=1, expert=8, pipeline=4), {Axis.PIPELINE}),
    ],
)
def test_of_several_slices_only_data_and_pipeline_cross_the_network(settings: MeshConfig, crossing: set[Axis]) -> None:
    mesh = make_mesh(settings, slices_of_tpus(4, (2, 2, 2)))
    assert mesh.devices.size == len(set(mesh.devices.flat)) == 32
    for axis in Axis:
        crosses = any(len({device.slice_index for device in line}) > 1 for line in along(mesh, axis))
        assert crosses == (axis in crossing), axis


def test_inside_a_slice_neighbours_along_the_last_axes_share_a_link() -> None:
    mesh = make_mesh(MeshConfig(data=4, expert=4, tensor=2), slices_of_tpus(2, (2, 4, 2)))
    for axis in (Axis.EXPERT, Axis.TENSOR):
        for line in along(mesh, axis):
            places = np.array([device.coords for device in line])
            assert (np.abs(np.diff(places, axis=0)).sum(axis=1) == 1).all(), axis


@pytest.mark.parametrize(
    ("settings", "sides"),
    [
        (MeshConfig(data=2, expert=8), (4, 4, 1)),  # v5e and v6e have two sides
        (MeshConfig(data=2, expert=2, tensor=4), (4, 2, 2)),  # jax gives the two short sides to tensor
    ],
)
def test_an_axis_may_fill_part_of_a_side_where_sizes_are_no_products_of_sides(
    settings: MeshConfig, sides: tuple[int, int, int]
) -> None:
    mesh = make_mesh(settings, slices_of_tpus(1, sides))
    assert len(set(mesh.devices.flat)) == 16


def test_nodes_of_gpus_follow_each_other() -> None:
    """Their devices have a slice index, too, and an axis may span nodes."""
    gpus: list[Any] = [Device(i, i // 4, platform="gpu", device_kind="NVIDIA H200") for i in reversed(range(16))]
    mesh = make_mesh(MeshConfig(data=2, expert=8), gpus)
    assert [device.id for device in mesh.devices.flat] == list(range(16))


@pytest.mark.parametrize(
    ("settings", "devices", "message"),
    [
        (
            MeshConfig(data=2, expert=16),
            slices_of_tpus(4, (2, 2, 2)),
            "mesh: data=2 × pipeline=1 does not divide into 4 slices, and other axes stay inside a slice of 8 devices, "
            "but take 16: make data × pipeline a multiple of 4",
        ),
        (MeshConfig(data=3), slices_of_tpus(2, (2, 1, 1))[:3], "mesh: the slices have 2, 1 devices: use slices of"),
    ],
)
def test_slices_that_would_separate_experts_are_refused(settings: MeshConfig, devices: list, message: str) -> None:
    with pytest.raises(MeshError) as error:
        make_mesh(settings, devices)
    assert str(error.value).startswith(message)
