"""Measured collectives of a cluster: which curve tells how long one takes over a group of its devices."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.plan.curves import Curve
from moe_jax.plan.nodes import shares


class Members(NamedTuple):
    """Of a group of devices."""

    ranks: int
    stride: int  # between two of them; 0: not the same everywhere
    per_node: int  # that share a node

    @property
    def leave_node(self) -> bool:
        return self.per_node < self.ranks


class _Found(NamedTuple):
    curve: Curve
    scale: float  # of its amounts


class MeasuredLinks:
    """Curves of collectives, each measured over groups of so many ranks at a stride, in nodes of so many devices."""

    def __init__(self, curves: Sequence[Curve], node_devices: int):
        self._curves, self._node_devices = curves, node_devices
        self._nearest = functools.cache(self._find)

    def seconds(self, name: str, amount: float, members: Members) -> float | None:
        """By the curve of this group, or of the one most like it that uses the same links; None if there is none.

        Of another group by what goes over these links: its time for as many bytes out of each rank, or each node.
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
    """Which share of an amount leaves a rank by the slowest links of its group; of sums twice that, in every group."""
    if name == "permute":
        return 1.0
    part = shares(members.ranks, members.per_node, relayed=not name.startswith("all_to_all"))
    return (part.between if members.leave_node else 1.0) * (members.ranks - 1) / members.ranks
