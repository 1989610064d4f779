"""Who exchanges rows: the ranks of a mesh axis, and which of them share a node."""

import math
from typing import NamedTuple

import jax
import numpy as np

from moe_jax.parallel.mesh import Axis


class Ranks(NamedTuple):
    """P = nodes · per_node ranks of an axis; rank p is the (p mod per_node)-th of node p // per_node."""

    axis: Axis
    platform: str  # of the devices: cpu, gpu or tpu
    per_node: int = 1

    def size(self) -> int:
        """P. Inside `shard_map` only, as all that follows."""
        return jax.lax.axis_size(self.axis)

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

    def between(self, distance: int, members: range) -> list[tuple[int, int]]:
        """From these members of each node to the same ones of the node so much further on, as pairs of ranks."""
        pairs = zip(self._numbers(), np.roll(self._numbers(), -distance, axis=0), strict=True)
        return [(int(source[m]), int(target[m])) for source, target in pairs for m in members]

    def _numbers(self) -> np.ndarray:
        """[nodes, per_node]"""
        return np.arange(self.size()).reshape(-1, self.per_node)


def ranks_per_node(devices: np.ndarray, dim: int) -> int:
    """Into how large groups of neighbours, each in one node, a dimension of a mesh's devices divides at most.

    A node is what fast links join, as far as devices tell: a slice if there are several, else a process.
    """
    lines = np.moveaxis(_nodes_of(devices), dim, -1)
    lines = lines.reshape(-1, lines.shape[-1])
    starts = np.nonzero((lines[:, 1:] != lines[:, :-1]).any(axis=0))[0] + 1  # ranks with which some line changes node
    return math.gcd(lines.shape[-1], *starts.tolist())


def _nodes_of(devices: np.ndarray) -> np.ndarray:
    slices = np.vectorize(lambda device: getattr(device, "slice_index", 0), otypes=[int])(devices)
    if len(np.unique(slices)) > 1:
        return slices
    return np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
