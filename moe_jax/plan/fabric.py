"""How long collectives take on a cluster: over groups of its devices, by the links that these groups have to use.

A group has `ranks` members, every `stride`-th device of a row of neighbours, or of several rows apart from each other.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from moe_jax.plan.clusters import Cluster
from moe_jax.plan.clusters.hardware import Level
from moe_jax.plan.exchange import ALGORITHMS, Links, exchange_seconds
from moe_jax.plan.nodes import shares
from moe_jax.plan.task_times import Linear

_MESSAGE_S = 1e-6  # to send one more message in the same collective: an estimate


class Group(NamedTuple):
    """Devices that work on one collective."""

    ranks: int
    stride: int
    rows: int = 1  # with as many of the ranks each
    row_stride: int = 0

    @property
    def span(self) -> int:
        """Neighbours among which they are."""
        return self.ranks * self.stride if self.rows == 1 else self.rows * self.row_stride


_OF_STAGE = ("context", "expert", "tensor")  # axes inside a pipeline stage, as parallel/mesh.py has them: nearest last


def group_over(axes: Collection[str], mesh: Mapping[str, int]) -> Group:
    """Devices that differ in data and in these axes of their pipeline stage; stages lie between the ranks of data."""
    inner = [axis for axis in _OF_STAGE if axis in axes]
    ranks = math.prod(mesh[axis] for axis in inner)
    stride = math.prod(mesh[axis] for axis in _OF_STAGE[_OF_STAGE.index(inner[-1]) + 1 if inner else 0 :])
    rows, row_stride = mesh["data"], mesh["pipeline"] * math.prod(mesh[axis] for axis in _OF_STAGE)
    if rows == 1 or mesh["pipeline"] == 1:
        return Group(rows * ranks, stride)
    return Group(rows, row_stride) if ranks == 1 else Group(rows * ranks, stride, rows, row_stride)


class Choice(NamedTuple):
    """An all-to-all algorithm, and how long it takes."""

    algorithm: str
    seconds: float


class Fabric:
    """The links of a cluster."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def ranks_per_node(self, group: Group) -> int:
        """Members that share the fastest links."""
        node, in_row = self._cluster.node_devices, group.ranks // group.rows
        near = max(min(in_row, node // group.stride), 1)
        if near == in_row and group.rows > 1:
            near *= max(min(group.rows, node // group.row_stride), 1)
        return near

    def leaves_node(self, group: Group) -> bool:
        """Whether members are on several nodes."""
        return self.ranks_per_node(group) < group.ranks

    def exchange(self, num_bytes: float, group: Group, algorithm: str = "auto") -> Choice:
        """An all-to-all of `num_bytes` that each rank holds for all ranks, its own included.

        By the fastest algorithm, unless `algorithm` is one that goes by way of nodes, or `flat`.
        """
        per_node = self.ranks_per_node(group)
        if group.ranks == 1:
            return Choice("flat", 0.0)
        if per_node == group.ranks:
            level = self._cluster.level(group.span)
            return Choice("flat", level.exchange_seconds(num_bytes * (1 - 1 / group.ranks), group.span))
        nodes, rest = divmod(group.ranks, per_node)
        names = ALGORITHMS if per_node > 1 and not rest else ("flat",)
        names = (algorithm,) if algorithm in names else names
        inside, between = self._levels(group)
        links = Links(
            inside=Linear(_MESSAGE_S, inside.exchange(inside.devices).beta_s),
            between=Linear(_MESSAGE_S, between.line.beta_s),
        )
        seconds = {name: exchange_seconds(name, num_bytes, nodes + (rest > 0), per_node, links) for name in names}
        best = min(seconds, key=lambda name: (seconds[name], ALGORITHMS.index(name)))
        return Choice(best, between.alpha_s + seconds[best])

    def ring(self, num_bytes: float, group: Group) -> float:
        """Seconds of an all-gather, a reduce-scatter or a sum in which `num_bytes` leave each rank."""
        if group.ranks == 1 or num_bytes == 0:
            return 0.0
        per_node = self.ranks_per_node(group)
        if per_node == group.ranks:
            return self._cluster.level(group.span).line.seconds(num_bytes)
        inside, between = self._levels(group)
        share = shares(group.ranks, per_node, relayed=True)
        slowest = max(share.inside * inside.line.beta_s, share.between * between.line.beta_s)
        return between.alpha_s + num_bytes * slowest

    def send(self, num_bytes: float, group: Group) -> float:
        """Seconds in which each rank sends so much to the next one, all at once; the slowest of them counts."""
        return self._cluster.level(group.span).line.seconds(num_bytes) if group.ranks > 1 else 0.0

    def _levels(self, group: Group) -> tuple[Level, Level]:
        return self._cluster.levels[0], self._cluster.level(group.span)
