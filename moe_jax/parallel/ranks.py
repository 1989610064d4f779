"""The ranks that exchange rows along a mesh axis, and which of them share a node."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.parallel.mesh import ALL_AXES, Axes, Axis


class Ranks(NamedTuple):
    """P = nodes · per_node ranks of an axis, or of several axes that act as one.

    Rank p is member p mod per_node of node p // per_node.
    """

    axis: Axes
    platform: str  # of the devices: cpu, gpu or tpu
    per_node: int = 1

    def size(self) -> int:
        """Return P. This method and all methods below run inside `shard_map` only."""
        return jax.lax.axis_size(self.axis)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def nodes(self) -> int:
        return self.size() // self.per_node

    def groups_inside(self) -> list[list[int]]:
        """Return the ranks of each node."""
        return self._numbers().tolist()

    def groups_between(self) -> list[list[int]]:
        """Return, for each member number, the ranks that have it in their nodes."""
        return self._numbers().T.tolist()

    def inside(self, source: int, target: int) -> list[tuple[int, int]]:
        """Return pairs of ranks: from one member of each node to another member of the same node."""
        return [(group[source], group[target]) for group in self.groups_inside()]

    def shifts_inside(self, distance: int) -> list[tuple[int, int]]:
        """Return pairs of ranks: from every member to the member `distance` further on in its node."""
        return [
            (rank, group[(member + distance) % len(group)])
            for group in self.groups_inside()
            for member, rank in enumerate(group)
        ]

    def between(self, distance: int, member: int) -> list[tuple[int, int]]:
        """Return pairs of ranks: from a member of each node to the same member of the node `distance` further on."""
        group = self.groups_between()[member]
        return [(rank, group[(node + distance) % len(group)]) for node, rank in enumerate(group)]

    def _numbers(self) -> np.ndarray:
        """Return the numbers of the ranks as [nodes, per_node]."""
        return np.arange(self.size()).reshape(-1, self.per_node)


def ranks_per_node(devices: np.ndarray, *dims: int, hosts: Sequence[int] = ()) -> int:
    """Return the size of the largest groups of neighbouring ranks that lie in one node each.

    `dims` are the dimensions of the mesh's devices over which the ranks run, as one. A node is a set of devices that
    fast links connect, as far as the devices report it: a slice if there are several; in one slice of TPUs a line of
    its torus, on which neighbours differ in one coordinate; otherwise a host. `hosts` has a number for the host of each
    process. A process without a number, as when a program is compiled for absent devices, counts as a host of its own.
    So does a process of CPU devices, which communicate faster within a process than between two of the same host.
    """

    def host_of(device: Any) -> tuple[bool, int]:
        process, is_cpu = device.process_index, device.platform == "cpu"
        return (False, process) if is_cpu or process >= len(hosts) else (True, hosts[process])

    last = np.moveaxis(devices, dims, range(-len(dims), 0))
    lines = last.reshape(-1, math.prod(last.shape[-len(dims) :]))
    changes = _changes(lines, lambda device: getattr(device, "slice_index", 0))
    if not changes and all(device.platform == "tpu" for device in lines.flat):
        return _line_of_torus(lines)
    return math.gcd(lines.shape[1], *(changes or _changes(lines, host_of)))


def _changes(lines: np.ndarray, node_of: Callable[[Any], Any]) -> list[int]:
    """Return the ranks at which some line enters another node."""
    return [
        rank
        for rank in range(1, lines.shape[1])
        if any(node_of(line[rank]) != node_of(line[rank - 1]) for line in lines)
    ]


def _line_of_torus(lines: np.ndarray) -> int:
    """Return how many neighbouring ranks of every line lie on one line of the torus.

    They differ only in the coordinate in which the first two ranks differ, or are cores of one chip.
    """

    def others(device: Any) -> tuple[int, ...]:
        return tuple(c for axis, c in enumerate(device.coords) if axis not in moving)

    pairs = [(line[0].coords, line[1].coords) for line in lines] if lines.shape[1] > 1 else []
    moving = {axis for a, b in pairs for axis in range(len(a)) if a[axis] != b[axis]}
    return math.gcd(lines.shape[1], *_changes(lines, others)) if len(moving) <= 1 else 1


def of_all_devices(x: jax.Array) -> jax.Array:
    """All-gather x: […] of each device → […, P] of all P devices of the mesh, in their order. Not differentiable."""
    with jax.named_scope("of_all_devices"):
        return jax.lax.all_gather(x, ALL_AXES, axis=x.ndim)
