"""Mesh sizes: -1 is resolved, wrong products are refused with a cure that works."""

import re

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


def test_axes_that_do_not_follow_the_links_of_tpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 4 of size 8")

    monkeypatch.setattr("jax.make_mesh", refuse)
    with pytest.raises(MeshError, match=r"^mesh: expert=8 cannot be laid along the links of these 8 devices: an axis"):
        make_mesh(MeshConfig(expert=8))
