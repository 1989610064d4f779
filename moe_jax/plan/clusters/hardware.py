"""The hardware of a cluster: devices, and levels of links that connect them in groups.

Rates are those of one jax device. Links are counted in one direction, out of one device.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_jax.plan.curves import Curve
from moe_jax.plan.launch_overhead import NO_OVERHEAD, LaunchOverhead
from moe_jax.plan.task_times import Linear

Platform = Literal["tpu", "gpu", "cpu"]

_STANDSTILL = 1e6  # slowdown of compute that stops while its device communicates


@dataclass(frozen=True, kw_only=True)
class Device:
    """One jax device."""

    name: str
    platform: Platform
    memory_bytes: int | None  # None: unknown, for a measured machine
    matrix_flops_per_s: float  # peak in bfloat16, dense
    memory_bytes_per_s: float
    matrix_efficiency: float  # share of the peak that large products reach
    watts: float | None  # at full load
    dollars_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links that connect groups of `devices` neighbours."""

    name: str
    devices: int
    alpha_s: float  # of one collective
    bytes_per_s: float  # published, all links of a device together; its share of a shared network adapter
    efficiency: float = 1.0  # share of that rate which long messages reach
    dimensions: int | None = None  # of a torus or a mesh; None: all devices are equally far from each other
    wraps: bool = False  # whether links wrap around, as in a torus

    @property
    def line(self) -> Linear:
        """The alpha-beta model by bytes that leave a device over all its links, as in a ring."""
        return Linear(self.alpha_s, 1 / (self.bytes_per_s * self.efficiency))

    def exchange(self, ranks: int) -> Linear:
        """The alpha-beta model by bytes that leave a device in an all-to-all over this many neighbours.

        On a torus of d dimensions, half of all rows cross the middle of each dimension: in a cube of side s they have
        s^(d-1) links of 1/2d of a device's rate each, and twice as many if the torus wraps around.
        """
        side = ranks ** (1 / self.dimensions) if self.dimensions else 1.0
        if ranks < 2 or not self.dimensions:
            return self.line
        wraps = 2 if self.wraps and ranks == self.devices else 1
        published = self.bytes_per_s * (1 if self.wraps else 2)  # a mesh's devices have half of the rate on average
        crossing = 2 * wraps * published / (self.dimensions * side) * (ranks - 1) / ranks
        return Linear(self.alpha_s, 1 / (min(self.bytes_per_s, crossing) * self.efficiency))

    def exchange_seconds(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-to-all in which `num_bytes` leave each of `ranks` neighbours."""
        return self.exchange(ranks).seconds(num_bytes)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A number of devices and their links: `levels` from the fastest links, in the smallest groups, to all devices."""

    name: str
    device: Device
    devices: int
    levels: tuple[Level, ...]
    compute_slowdown: float = 1.0  # factor of compute time while the device communicates
    launch_overhead: LaunchOverhead = NO_OVERHEAD  # compute time that each collective costs
    ranks_per_adapter: float = 1.0  # neighbours that share a network adapter
    curves: tuple[Curve, ...] = ()  # measured collectives, used instead of levels

    @property
    def node_devices(self) -> int:
        """The number of neighbours that the fastest links connect: those of a node or slice."""
        return self.levels[0].devices

    def level(self, ranks: int) -> Level:
        """The links that a group of this many neighbours has to use."""
        return next((level for level in self.levels if ranks <= level.devices), self.levels[-1])

    def simulated(self) -> "Cluster":
        """The cluster of devices simulated in one process.

        The cores that would compute also copy what a device sends, so nothing overlaps.
        """
        return dataclasses.replace(self, compute_slowdown=_STANDSTILL)

    @property
    def watts(self) -> float | None:
        """Power of all devices at full load; None if unknown."""
        return None if self.device.watts is None else self.devices * self.device.watts

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all devices; None if unknown."""
        return None if self.device.dollars_per_hour is None else self.devices * self.device.dollars_per_hour


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A kind of cluster, for any available size."""

    device: Device
    unit: int  # devices of a node or host; larger clusters are multiples of it
    unit_name: str
    adapters_per_unit: int | None
    largest_slice: int | None  # devices; None: there are nodes but no slices
    torus: int | None  # larger slices have a multiple of this many devices, smaller ones half of it, a quarter, …
    levels: Callable[[int, int], tuple[Level, ...]]  # by the numbers of all devices, and of a slice or node's
