"""Which neighbours along an axis share a node: as devices tell, whatever the mesh."""

from types import SimpleNamespace

import numpy as np
import pytest

from moe_jax.parallel.ranks import ranks_per_node


def devices_of(shape: tuple[int, int], processes: list[int], slices: list[int] | None = None) -> np.ndarray:
    """Stand for the devices of a mesh, data × expert: no test machine has several nodes."""
    slices = [0] * len(processes) if slices is None else slices
    devices = np.empty(len(processes), object)
    devices[:] = [SimpleNamespace(process_index=p, slice_index=s) for p, s in zip(processes, slices, strict=True)]
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
        ((1, 8), FOUR_EACH, [0] * 8, 4),  # one slice tells nothing
        ((1, 8), [0, 1] * 4, None, 1),  # nodes in turn: no neighbours share one
        ((2, 6), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], None, 2),  # 4 + 2 and 2 + 4
        ((1, 6), [0, 0, 0, 0, 1, 1], None, 2),
        ((1, 5), [0, 0, 0, 1, 1], None, 1),
    ],
)
def test_as_many_neighbours_as_share_a_node_on_every_line(shape, processes, slices, expected):
    assert ranks_per_node(devices_of(shape, processes, slices), dim=1) == expected


def test_devices_that_know_no_slices_have_processes():
    devices = devices_of((8, 1), FOUR_EACH)
    for device in devices.flat:
        del device.slice_index
    assert ranks_per_node(devices, dim=0) == 4
