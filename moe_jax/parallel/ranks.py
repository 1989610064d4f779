"""Who exchanges rows: the ranks of a mesh axis, and which of them share a node."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.parallel.mesh import ALL_AXES, Axes, Axis


class Ranks(NamedTuple):
    """P = nodes · per_node ranks of an axis, or of several axes as one.

    Rank p is the (p mod per_node)-th of node p // per_node.
    """

    axis: Axes
    platform: str  # of the devices: cpu, gpu or tpu
    per_node: int = 1

    def size(self) -> int:
        """P. Inside `shard_map` only, as all that follows."""
        return jax.lax.axis_size(self.axis)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def nodes(self) -> int:
        return self.size() // self.per_node

    def groups_inside(self) -> list[list[int]]:
        """The ranks of each node."""
        return self._numbers().tolist()

    def groups_between(self) -> list[list[int]]:
        """The ranks that have the same place in all nodes."""
        return self._numbers().T.tolist()

    def inside(self, source: int, target: int) -> list[tuple[int, int]]:
        """From one member of each node to another one, as pairs of ranks."""
        return [(group[source], group[target]) for group in self.groups_inside()]

    def shifts_inside(self, distance: int) -> list[tuple[int, int]]:
        """From every member of each node to the one so much further on in it, as pairs of ranks."""
        return [
            (rank, group[(member + distance) % len(group)])
            for group in self.groups_inside()
            for member, rank in enumerate(group)
        ]

    def between(self, distance: int, member: int) -> list[tuple[int, int]]:
        """From a member of each node to the same one of the node so much further on, as pairs of ranks."""
        group = self.groups_between()[member]
        return [(rank, group[(node + distance) % len(group)]) for node, rank in enumerate(group)]

    def _numbers(self) -> np.ndarray:
        """[nodes, per_node]"""
        return np.arange(self.size()).reshape(-1, self.per_node)


def ranks_per_node(devices: np.ndarray, *dims: int) -> int:
    """Into how large groups of neighbours, each in one node, dimensions of a mesh's devices divide at most, as one.

    A node is what fast links join, as far as devices tell: a slice if there are several; in one slice of TPUs a line
    of its torus, on which neighbours differ in one coordinate; else a process.
    """
    last = np.moveaxis(devices, dims, range(-len(dims), 0))
    lines = last.reshape(-1, math.prod(last.shape[-len(dims) :]))
    changes = _changes(lines, lambda device: getattr(device, "slice_index", 0))
    if not changes and all(device.platform == "tpu" for device in lines.flat):
        return _line_of_torus(lines)
    return math.gcd(lines.shape[1], *(changes or _changes(lines, lambda device: device.process_index)))


def _changes(lines: np.ndarray, node_of: Callable[[Any], Any]) -> list[int]:
    """The ranks with which some line comes to another node."""
    return [
        rank
        for rank in range(1, lines.shape[1])
        if any(node_of(line[rank]) != node_of(line[rank - 1]) for line in lines)
    ]


def _line_of_torus(lines: np.ndarray) -> int:
    """Ranks of every line that differ in the coordinate in which its first two do, or are cores of one chip."""

    def others(device: Any) -> tuple[int, ...]:
        return tuple(c for axis, c in enumerate(device.coords) if axis not in moving)

    pairs = [(line[0].coords, line[1].coords) for line in lines] if lines.shape[1] > 1 else []
    moving = {axis for a, b in pairs for axis in range(len(a)) if a[axis] != b[axis]}
    return math.gcd(lines.shape[1], *_changes(lines, others)) if len(moving) <= 1 else 1


def of_all_devices(x: jax.Array) -> jax.Array:
    """[…] of each device → […, P] of all P devices of the mesh, in their order. Not to be differentiated."""
    with jax.named_scope("of_all_devices"):
        return jax.lax.all_gather(x, ALL_AXES, axis=x.ndim)
