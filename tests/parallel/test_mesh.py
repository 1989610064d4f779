"""Mesh sizes: -1 is resolved, wrong products are refused with a cure that works."""

import re

import pytest

from moe_jax.config import Mesh
from moe_jax.errors import MeshError
from moe_jax.parallel.mesh import Axis, batch_shards, make_mesh, mesh_sizes


@pytest.mark.parametrize(
    ("settings", "data", "expert"),
    [(Mesh(), 8, 1), (Mesh(expert=4), 2, 4), (Mesh(data=2, expert=-1), 2, 4), (Mesh(data=4, expert=2), 4, 2)],
)
def test_sizes(settings, data, expert):
    sizes = mesh_sizes(settings, 8)
    assert (sizes[Axis.DATA], sizes[Axis.EXPERT]) == (data, expert)
    assert batch_shards(make_mesh(settings)) == 8


def test_every_axis_has_a_setting():
    assert set(Mesh().sizes) == set(Axis)


WRONG = [
    *(Mesh(data=3), Mesh(expert=3), Mesh(data=2, expert=2), Mesh(data=1, expert=16)),
    *(Mesh(tensor=3), Mesh(tensor=16), Mesh(expert=4, tensor=6), Mesh(expert=8, tensor=2), Mesh(data=3, tensor=-1)),
    Mesh(pipeline=3, expert=2),
    Mesh(data=1, pipeline=2, context=8),
]


@pytest.mark.parametrize("settings", WRONG)
def test_wrong_products_name_a_cure_that_works(settings):
    with pytest.raises(MeshError) as error:
        mesh_sizes(settings, 8)
    changes = dict(re.findall(r"mesh\.(\w+)=(-?\d+)", str(error.value).split("use ")[1]))
    cured = settings.sizes | {name: int(size) for name, size in changes.items()}
    assert mesh_sizes(Mesh(**cured), 8)


def test_a_lone_device_may_be_simulated_as_many():
    for settings in (Mesh(expert=4), Mesh(data=1, expert=4)):
        with pytest.raises(MeshError, match=r"expert=4 = 4, but there is one device: use mesh.cpu_devices=4 to simul"):
            mesh_sizes(settings, 1)
    assert mesh_sizes(Mesh(expert=4), 4)
    assert mesh_sizes(Mesh(), 1)


def test_neighbours_along_the_expert_axis_are_neighbouring_devices():
    mesh = make_mesh(Mesh(data=2, expert=4))
    ids = [device.id for device in mesh.devices.flatten()]
    assert ids == sorted(ids)
    assert mesh.axis_names.index(Axis.EXPERT) > mesh.axis_names.index(Axis.DATA)


def test_axes_that_do_not_follow_the_links_of_tpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 4 of size 8")

    monkeypatch.setattr("jax.make_mesh", refuse)
    with pytest.raises(MeshError, match=r"^mesh: expert=8 cannot be laid along the links of these 8 devices: an axis"):
        make_mesh(Mesh(expert=8))
