"""Measured collectives of a cluster: which curve predicts the duration of a collective over a group of its devices."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.plan.curves import Curve
from moe_jax.plan.nodes import shares


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
        self._nearest = functools.cache(self._find)

    def seconds(self, name: str, amount: float, members: Members) -> float | None:
        """Seconds by the curve of this group, or of the most similar one that uses the same links; None without any.

        The curve of another group is scaled by the bytes that cross these links: equal bytes out of each rank, or each
        node, take equal time.
        """
        found = self._nearest(name, members)
        return None if found is None else found.curve.seconds(amount * found.scale)

    def _find(self, name: str, members: Members) -> _Found | None:
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
