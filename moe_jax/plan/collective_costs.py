"""How long collectives take on a cluster, over groups of its devices and by the links that these groups have to use.

A group has `ranks` members: every `stride`-th device of a row of neighbours, or of several separate rows. The shares
of its bytes that stay inside a node and go to other nodes depend on how many members are on a node. A measured cluster
has curves of collectives instead of links.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from moe_jax.config.registry import EXCHANGE_FACTS, OPEN_EXCHANGE
from moe_jax.plan.caching import cached_method
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.clusters.hardware import Level
from moe_jax.plan.curves import Curve
from moe_jax.plan.exchange import ALGORITHMS, Links, exchange_seconds, ring_seconds
from moe_jax.plan.task_times import Linear


class Shares(NamedTuple):
    """Shares of the bytes that leave a rank."""

    inside: float
    between: float


def shares(ranks: int, per_node: int, relayed: bool) -> Shares:
    """The shares for a rank of a group of `ranks` (two or more), of which `per_node` are on its node, itself included.

    An all-to-all has a block for every rank, which is sent there directly. Data that all ranks of another node need
    alike (the parts of an all-gather; in reverse, those of a sum) is `relayed`: it is assumed to be sent there once,
    with an equal part by each rank of a node, and passed on inside. Hierarchical algorithms do so.
    """
    between = (ranks - per_node) / (ranks - 1) / (per_node if relayed else 1)
    return Shares(1 - between, between)


def ring_shares(per_node: int) -> Shares:
    """The shares of a rank in rings of NCCL over several nodes: each rank is the last one of its node in an equal part.

    Every part of an all-gather passes through every node, also on the way back to where it came from.
    """
    return Shares(1 - 1 / per_node, 1 / per_node)


class Members(NamedTuple):
    """The members of a group of devices."""

    ranks: int
    stride: int  # distance of neighbouring members; 0: not uniform
    per_node: int  # members on one node

    @property
    def leave_node(self) -> bool:
        return self.per_node < self.ranks


class _Found(NamedTuple):
    """A curve, and a factor for amounts."""

    curve: Curve
    scale: float


class MeasuredLinks:
    """Curves of collectives, each measured over groups of `ranks` devices at a `stride`, in nodes of `node_devices`."""

    def __init__(self, curves: Sequence[Curve], node_devices: int):
        self._curves, self._node_devices = curves, node_devices

    def seconds(self, name: str, amount: float, members: Members) -> float | None:
        """Seconds by the curve of this group, or of the most similar one that uses the same links; None without any.

        The curve of another group is scaled by the bytes that cross these links: equal bytes out of each rank, or each
        node, take equal time.
        """
        found = self._nearest(name, members)
        return None if found is None else found.curve.seconds(amount * found.scale)

    @cached_method
    def _nearest(self, name: str, members: Members) -> _Found | None:
        known = [(self._members(curve), curve) for curve in self._curves if curve.name == name]
        alike = [(each, curve) for each, curve in known if each.leave_node == members.leave_node]
        if not alike:
            return None

        def unlike(other: Members) -> tuple[bool, bool, float, int]:
            apart = abs(math.log(other.ranks / members.ranks))
            return other != members, other.per_node != members.per_node, apart, -other.stride

        nearest, curve = min(alike, key=lambda each: unlike(each[0]))
        return _Found(curve, _crossing(name, members) / _crossing(name, nearest))

    def _members(self, curve: Curve) -> Members:
        ranks, stride = curve.settings["ranks"], curve.settings["stride"]
        return Members(ranks, stride, min(ranks, max(self._node_devices // stride, 1)))


def _crossing(name: str, members: Members) -> float:
    """The share of an amount that leaves a rank by the slowest links of its group.

    For sums it is twice as much in every group, which does not change ratios.
    """
    if name == "permute":
        return 1.0
    part = shares(members.ranks, members.per_node, relayed=not name.startswith("all_to_all"))
    return (part.between if members.leave_node else 1.0) * (members.ranks - 1) / members.ranks


Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "permute"]


class DeviceGroup(NamedTuple):
    """Devices that take part in one collective."""

    ranks: int
    stride: int
    rows: int = 1  # each with the same number of ranks
    row_stride: int = 0

    @property
    def span(self) -> int:
        """The number of neighbouring devices that the group spans."""
        return self.ranks * self.stride if self.rows == 1 else self.rows * self.row_stride


# Axes inside a pipeline stage, as in parallel/mesh.py: ranks of the last one are the nearest neighbours.
_OF_STAGE = ("context", "expert", "tensor")


def group_over(axes: Collection[str], mesh: Mapping[str, int], *, with_data: bool = True) -> DeviceGroup:
    """The devices that differ in `data` and in these axes of their pipeline stage; or in these axes alone.

    Pipeline stages lie between the ranks of `data` in the device order.
    """
    return _group_over(tuple(axes), with_data, **mesh)


@functools.lru_cache(maxsize=1024)
def _group_over(axes: tuple[str, ...], with_data: bool, **mesh: int) -> DeviceGroup:
    inner = [axis for axis in _OF_STAGE if axis in axes]
    ranks = math.prod(mesh[axis] for axis in inner)
    stride = math.prod(mesh[axis] for axis in _OF_STAGE[_OF_STAGE.index(inner[-1]) + 1 if inner else 0 :])
    rows, row_stride = mesh["data"] if with_data else 1, mesh["pipeline"] * math.prod(mesh[axis] for axis in _OF_STAGE)
    if rows == 1 or mesh["pipeline"] == 1:
        return DeviceGroup(rows * ranks, stride)
    return DeviceGroup(rows, row_stride) if ranks == 1 else DeviceGroup(rows * ranks, stride, rows, row_stride)


class ExchangeChoice(NamedTuple):
    """An all-to-all algorithm and its duration."""

    algorithm: str
    seconds: float


class CollectiveCosts:
    """Durations of collectives on the links of a cluster."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._measured = MeasuredLinks(cluster.curves, cluster.node_devices)

    def ranks_per_node(self, group: DeviceGroup) -> int:
        """The number of members that share the fastest links."""
        node, in_row = self._cluster.node_devices, group.ranks // group.rows
        near = max(min(in_row, node // group.stride), 1)
        if near == in_row and group.rows > 1:
            near *= max(min(group.rows, node // group.row_stride), 1)
        return near

    def leaves_node(self, group: DeviceGroup) -> bool:
        """Whether members are on several nodes."""
        return self.ranks_per_node(group) < group.ranks

    def stay_inside_nodes(self, group: DeviceGroup) -> bool:
        """Whether there are several nodes of GPUs, and two or more members that share one."""
        several = self._cluster.node_devices < self._cluster.devices
        return several and group.ranks > 1 and not self.leaves_node(group) and self._cluster.device.platform == "gpu"

    def share_links(self, one: DeviceGroup, other: DeviceGroup) -> bool:
        """Whether transfers within both groups use the same links. Axes of a torus are assumed to have their own."""
        if min(one.ranks, other.ranks) == 1:
            return False
        levels = [self._cluster.level(group.span) for group in (one, other)]
        return levels[0].devices == levels[1].devices and levels[0].dimensions is None

    def exchange(
        self, num_bytes: float, group: DeviceGroup, algorithm: str = OPEN_EXCHANGE, permutes: bool = True
    ) -> ExchangeChoice:
        """The all-to-all of `num_bytes` that each rank has for all ranks, its own block included.

        It uses the fastest algorithm, unless `algorithm` names one; without `permutes`, of those that send from all
        ranks to all. Hierarchical algorithms become flat without nodes.
        """
        if group.ranks == 1:
            return ExchangeChoice("flat", 0.0)
        per_node = self.ranks_per_node(group)
        has_nodes = 1 < per_node < group.ranks and group.ranks % per_node == 0
        possible = [name for name, facts in EXCHANGE_FACTS.items() if has_nodes or not facts.by_node]
        names: tuple[str, ...] = (algorithm if algorithm in possible else "flat",)
        if algorithm == OPEN_EXCHANGE and has_nodes:
            names = tuple(name for name in ALGORITHMS if permutes or not EXCHANGE_FACTS[name].permutes)
        measured = {name: self._exchange_measured(name, num_bytes, group) for name in names}
        seconds = {name: time_s for name, time_s in measured.items() if time_s is not None}
        seconds = seconds or {name: self._exchange_modelled(name, num_bytes, group) for name in names}
        best = min(seconds, key=lambda name: seconds[name])  # among equals the first, which has the fewest phases
        return ExchangeChoice(best, seconds[best])

    def _exchange_measured(self, algorithm: str, num_bytes: float, group: DeviceGroup) -> float | None:
        form = EXCHANGE_FACTS[algorithm].counted_as
        return self._measured.seconds(f"all_to_all.{form}", num_bytes, self._members(group))

    def _exchange_modelled(self, algorithm: str, num_bytes: float, group: DeviceGroup) -> float:
        """The duration by closed forms."""
        form = EXCHANGE_FACTS[algorithm].counted_as
        per_node, hops = self.ranks_per_node(group), group.ranks - 1
        if per_node == group.ranks:
            level = self._cluster.level(group.span)
            more_s = (hops - 1) * level.exchange_line.alpha_s if form == "ring" else 0.0
            return more_s + level.exchange_seconds(num_bytes * hops / group.ranks, group.span)
        inside, between = self._levels(group)
        line, devices = between.exchange_line, self._cluster.ranks_per_adapter
        sharers = min(devices, per_node)  # the adapter's other devices are in groups that send at the same time
        links = Links(
            inside=Linear(inside.message_s, inside.exchange(inside.devices).beta_s),
            between=Linear(between.message_s * devices / sharers, line.beta_s / sharers),
            ranks_per_adapter=sharers,
        )
        nodes = math.ceil(group.ranks / per_node)
        if form == "ring":
            return hops * line.alpha_s + ring_seconds(num_bytes, nodes, per_node, links)
        ramp_s = line.beyond_start_s(num_bytes) - num_bytes * line.beta_s
        return line.alpha_s + ramp_s + exchange_seconds(form, num_bytes, nodes, per_node, links)

    def ring(self, num_bytes: float, group: DeviceGroup, collective: Collective = "all_gather") -> float:
        """Seconds of a collective, or of all hops of permutes, in which `num_bytes` leave each rank around a ring."""
        if group.ranks == 1 or num_bytes == 0:
            return 0.0
        measured_s = self._ring_measured(num_bytes, group, collective)
        return self._ring_modelled(num_bytes, group) if measured_s is None else measured_s

    def _ring_measured(self, num_bytes: float, group: DeviceGroup, collective: Collective) -> float | None:
        hops, members = group.ranks - 1, self._members(group)
        if collective == "permute":
            hop_s = self._measured.seconds(collective, num_bytes / hops, members)
            return None if hop_s is None else hops * hop_s
        rounds = 2 if collective == "all_reduce" else 1
        return self._measured.seconds(collective, num_bytes / rounds * group.ranks / hops, members)

    def _ring_modelled(self, num_bytes: float, group: DeviceGroup) -> float:
        per_node = self.ranks_per_node(group)
        if per_node == group.ranks:
            return self._cluster.level(group.span).line.seconds(num_bytes)
        inside, between = self._levels(group)
        share = shares(group.ranks, per_node, relayed=True)
        if self._cluster.device.platform == "gpu":
            share = ring_shares(per_node)
        slowest = max(share.inside * inside.line.beta_s, share.between * between.line.beta_s)
        return Linear(between.ring.alpha_s, slowest, between.ring.ramp_s).seconds(num_bytes)

    def passed_on_s(self, num_bytes: float, group: DeviceGroup) -> float:
        """Seconds inside of nodes, of a sum in which `num_bytes` leave each rank: it is scattered inside of each node,
        then summed between nodes, and gathered inside of each node.
        """
        per_node = self.ranks_per_node(group)
        if per_node in (1, group.ranks):
            return 0.0
        inside = self._levels(group)[0].line
        return 2 * inside.alpha_s + shares(group.ranks, per_node, relayed=True).inside * num_bytes * inside.beta_s

    def send(self, num_bytes: float, group: DeviceGroup) -> float:
        """Seconds in which each rank sends `num_bytes` to the next one, all concurrently; the slowest one counts."""
        if group.ranks == 1:
            return 0.0
        measured_s = self._measured.seconds("permute", num_bytes, self._members(group))
        return self._cluster.level(group.span).line.seconds(num_bytes) if measured_s is None else measured_s

    def _members(self, group: DeviceGroup) -> Members:
        return Members(group.ranks, group.stride if group.rows == 1 else 0, self.ranks_per_node(group))

    def _levels(self, group: DeviceGroup) -> tuple[Level, Level]:
        return self._cluster.levels[0], self._cluster.level(group.span)
