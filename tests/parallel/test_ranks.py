"""Which neighbours along an axis share a node: from the attributes of devices, whatever the mesh."""

from types import SimpleNamespace

import numpy as np
import pytest

from moe_jax.parallel.ranks import ranks_per_node


def devices_of(shape: tuple[int, int], processes: list[int], slices: list[int] | None = None) -> np.ndarray:
    """Stand for the devices of a mesh, data × expert: no test machine has several nodes."""
    slices = [0] * len(processes) if slices is None else slices
    devices = np.empty(len(processes), object)
    devices[:] = [
        SimpleNamespace(platform="gpu", process_index=p, slice_index=s) for p, s in zip(processes, slices, strict=True)
    ]
    return devices.reshape(shape)


FOUR_EACH = [0, 0, 0, 0, 1, 1, 1, 1]
ONE_EACH = list(range(8))


@pytest.mark.parametrize(
    ("shape", "processes", "slices", "expected"),
    [
        ((1, 8), [0] * 8, None, 8),
        ((1, 8), FOUR_EACH, None, 4),
        ((2, 4), FOUR_EACH, None, 4),
        ((4, 2), FOUR_EACH, None, 2),
        ((8, 1), FOUR_EACH, None, 1),
        ((1, 8), ONE_EACH, None, 1),
        ((1, 8), ONE_EACH, FOUR_EACH, 4),  # slices come before processes
        ((1, 8), FOUR_EACH, [0] * 8, 4),  # a single slice has no borders between nodes
        ((1, 8), [0, 1] * 4, None, 1),  # nodes in turn: no neighbours share one
        ((2, 6), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], None, 2),  # 4 + 2 and 2 + 4
        ((1, 6), [0, 0, 0, 0, 1, 1], None, 2),
        ((1, 5), [0, 0, 0, 1, 1], None, 1),
    ],
)
def test_as_many_neighbours_as_share_a_node_on_every_line(shape, processes, slices, expected):
    assert ranks_per_node(devices_of(shape, processes, slices), 1) == expected


@pytest.mark.parametrize(
    ("processes", "hosts", "expected"),
    [
        (ONE_EACH, [7] * 8, 8),  # a process for each GPU of one host
        (ONE_EACH, FOUR_EACH, 4),  # a process for each GPU of two hosts
        (FOUR_EACH, [3, 3], 8),
        (FOUR_EACH, [3, 4], 4),
        (FOUR_EACH, [0, 1] * 4, 4),
        (ONE_EACH, [0, 0, 0, 1, 0, 0, 0, 1], 1),
        (FOUR_EACH, [0], 4),  # absent devices: the second process does not exist
        (FOUR_EACH, [1], 4),
    ],
)
def test_processes_of_one_host_are_one_node(processes, hosts, expected):
    assert ranks_per_node(devices_of((1, 8), processes), 1, hosts=hosts) == expected
    in_slices = devices_of((1, 8), processes, [0, 0, 1, 1, 2, 2, 3, 3])
    assert ranks_per_node(in_slices, 1, hosts=hosts) == 2, "slices come before hosts"


def test_neighbours_along_two_axes_are_counted_as_along_one():
    two_axes = devices_of((1, 2, 4), [0, 0, 1, 1, 2, 2, 3, 3])
    assert ranks_per_node(two_axes, 1, 2) == 2
    assert ranks_per_node(two_axes, 2, 1) == 1, "in this order none shares a node with the next one"


def test_devices_that_know_no_slices_have_processes():
    devices = devices_of((8, 1), FOUR_EACH)
    for device in devices.flat:
        del device.slice_index
    assert ranks_per_node(devices, 0) == 4


def torus(shape: tuple[int, int], *sizes: int, cores: int = 1) -> np.ndarray:
    """The chips of a torus, its first coordinate fastest; four to a process."""
    devices = np.empty(shape[0] * shape[1], object)
    coords = [tuple(reversed(place)) for place in np.ndindex(*reversed(sizes)) for _ in range(cores)]
    devices[:] = [
        SimpleNamespace(platform="tpu", process_index=i // 4, slice_index=0, coords=c) for i, c in enumerate(coords)
    ]
    return devices.reshape(shape)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (torus((1, 8), 2, 2, 2), 2),
        (torus((1, 16), 4, 2, 2), 4),
        (torus((4, 4), 4, 2, 2), 4),
        (torus((2, 8), 4, 4, 1), 4),
        (torus((4, 2), 4, 2, 1), 2),
        (torus((1, 8), 2, 2, 1, cores=2), 2),  # the two of a chip
        (torus((1, 8), 2, 2, 2)[:, [0, 3, 1, 2, 4, 7, 5, 6]], 1),  # neighbours that are none
        (torus((8, 1), 2, 2, 2), 1),
    ],
)
def test_in_one_slice_of_a_torus_a_node_is_one_of_its_lines(devices, expected):
    assert ranks_per_node(devices, 1) == expected


def test_coordinates_of_other_devices_show_nothing():
    devices = torus((1, 8), 2, 2, 2)
    for device in devices.flat:
        device.platform = "gpu"
    assert ranks_per_node(devices, 1) == 4


def test_several_slices_come_before_coordinates():
    devices = torus((1, 8), 2, 2, 2)
    for i, device in enumerate(devices.flat):
        device.slice_index = i // 4
    assert ranks_per_node(devices, 1) == 4
