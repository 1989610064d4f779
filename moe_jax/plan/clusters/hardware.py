"""What a cluster is made of: devices, and levels of links that join them in groups.

Rates are those of one jax device. Links are counted in one direction, out of one device.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_jax.plan.curves import Curve
from moe_jax.plan.launch_overhead import FREE, Handling
from moe_jax.plan.task_times import Linear

Platform = Literal["tpu", "gpu", "cpu"]

_STANDSTILL = 1e6  # times longer: nothing is computed beside it


@dataclass(frozen=True, kw_only=True)
class Device:
    """One jax device."""

    name: str
    platform: Platform
    memory_bytes: int | None  # None: not known of a measured machine
    matrix_flops_per_s: float  # peak in bfloat16, dense
    memory_bytes_per_s: float
    matrix_efficiency: float  # of the peak, in large products
    watts: float | None  # at full load
    dollars_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links that join groups of `devices` neighbours."""

    name: str
    devices: int
    alpha_s: float  # of one collective
    bytes_per_s: float  # published, of all links of a device together; of a shared network adapter its part
    efficiency: float = 1.0  # of that, in long messages
    dimensions: int | None = None  # of a torus or a mesh; None: all devices are equally far from each other
    wraps: bool = False  # around, as a torus does

    @property
    def line(self) -> Linear:
        """Of bytes that leave a device over all its links, as rings send them."""
        return Linear(self.alpha_s, 1 / (self.bytes_per_s * self.efficiency))

    def exchange(self, ranks: int) -> Linear:
        """Of bytes that leave a device in an all-to-all over so many neighbours.

        On a torus of d dimensions half of all rows cross the middle of each: in a cube of side s they have s^(d-1)
        links of 1/2d of a device's rate each, twice as many where it wraps around.
        """
        side = ranks ** (1 / self.dimensions) if self.dimensions else 1.0
        if ranks < 2 or not self.dimensions:
            return self.line
        wraps = 2 if self.wraps and ranks == self.devices else 1
        published = self.bytes_per_s * (1 if self.wraps else 2)  # a mesh's devices have half of it on average
        crossing = 2 * wraps * published / (self.dimensions * side) * (ranks - 1) / ranks
        return Linear(self.alpha_s, 1 / (min(self.bytes_per_s, crossing) * self.efficiency))

    def exchange_seconds(self, num_bytes: float, ranks: int) -> float:
        """Of an all-to-all in which so many bytes leave each of `ranks` neighbours."""
        return self.exchange(ranks).seconds(num_bytes)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many devices, and what joins them: `levels` from the fastest links, in the smallest groups, to all."""

    name: str
    device: Device
    devices: int
    levels: tuple[Level, ...]
    compute_slowdown: float = 1.0  # how many times longer compute takes while its device communicates
    handling: Handling = FREE  # what each collective takes of compute
    ranks_per_adapter: float = 1.0  # neighbours that share a network adapter
    curves: tuple[Curve, ...] = ()  # of collectives that were measured there, used instead of levels

    @property
    def node_devices(self) -> int:
        """Neighbours that the fastest links join: those of a node or slice."""
        return self.levels[0].devices

    def level(self, ranks: int) -> Level:
        """The links that a group of so many neighbours has to use."""
        return next((level for level in self.levels if ranks <= level.devices), self.levels[-1])

    def simulated(self) -> "Cluster":
        """Of devices of one process: what one sends is copied by the cores that would compute, so nothing overlaps."""
        return dataclasses.replace(self, compute_slowdown=_STANDSTILL)

    @property
    def watts(self) -> float | None:
        """Of all devices at full load."""
        return None if self.device.watts is None else self.devices * self.device.watts

    @property
    def dollars_per_hour(self) -> float | None:
        """Of all devices."""
        return None if self.device.dollars_per_hour is None else self.devices * self.device.dollars_per_hour


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A kind of cluster, of any size that it comes in."""

    device: Device
    unit: int  # devices of a node or host, which several are multiples of
    unit_name: str
    adapters_per_unit: int | None
    largest_slice: int | None  # devices; None: there are only nodes
    torus: int | None  # devices that larger slices have a multiple of, and smaller ones half of, a quarter, …
    levels: Callable[[int, int], tuple[Level, ...]]  # of all devices, and those of a slice or node
