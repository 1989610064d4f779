"""The hardware of a cluster: devices, and levels of links that connect them in groups.

Rates are those of one jax device. Links are counted in one direction, out of one device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe_jax.config.attention_kernels import HOPPER, Capability
from moe_jax.config.sections import HashedOnce
from moe_jax.plan.curves import Curve
from moe_jax.plan.launch_overhead import NO_OVERHEAD, LaunchOverhead
from moe_jax.plan.task_times import Linear
from moe_jax.schedule.simulation import NO_INTERFERENCE, Interference

Platform = Literal["tpu", "gpu", "cpu"]

_STANDSTILL = 1e6  # slowdown of compute that stops while its device communicates


class Tile(NamedTuple):
    """A part of a product's result that one unit computes."""

    rows: int
    columns: int
    share: float  # of the device's rate that large products with such tiles reach


class MatrixUnits(NamedTuple):
    """The units of a device that compute matrix products (`plan/products.py`)."""

    at_once: int  # tiles that are computed at once
    tiles: tuple[Tile, ...]
    start: int  # inner size that starting and finishing a tile takes as long as


class RateShares(NamedTuple):
    """Rates of products relative to the rate in bfloat16, by the type of the operands."""

    float32: float = 1.0  # with the precision that jax uses if none is set
    exact: float = 1.0  # float32 without rounding of the operands
    fp8: float = 1.0  # 1: they are multiplied as bfloat16

    def of(self, kind: str) -> float:
        """The relative rate of one type of operands."""
        return 1.0 if kind == "bfloat16" else float(getattr(self, kind))


_ANY_SIZE = MatrixUnits(1, (Tile(1, 1, 1.0),), 0)  # no loss in small products
_ALL_ALIKE = RateShares()


@dataclass(frozen=True, kw_only=True)
class Device(HashedOnce):
    """One jax device."""

    __hash__ = HashedOnce.__hash__

    name: str
    platform: Platform
    memory_bytes: int | None  # None: unknown, for a measured machine
    matrix_flops_per_s: float  # peak in bfloat16, dense
    memory_bytes_per_s: float  # published, or measured
    matrix_efficiency: float  # share of the peak that large products reach
    watts: float | None  # at full load
    dollars_per_hour: float | None
    memory_efficiency: float = 1.0  # share of the published rate that copies reach
    kernel_s: float = 0.0  # to start and finish one kernel or fusion, without its work
    attention_efficiency: float = 1.0  # share of the peak that flash attention reaches
    capability: Capability | None = HOPPER  # of a GPU, which decides its attention kernel; None: not NVIDIA's
    units: MatrixUnits = _ANY_SIZE
    rate_shares: RateShares = _ALL_ALIKE
    curves: tuple[Curve, ...] = ()  # measured products and attention, used instead of units

    @property
    def copied_bytes_per_s(self) -> float:
        """Bytes that are read or written per second."""
        return self.memory_bytes_per_s * self.memory_efficiency

    def slowest_of(self, count: int, variation: float) -> "Device":
        """The slowest of this many devices, which a step waits for, if their speeds vary by this standard deviation.

        The least of n normal variates is expected about √(2 ln n) standard deviations below their mean.
        """
        slower = 1 + variation * math.sqrt(2 * math.log(count))
        return dataclasses.replace(
            self,
            matrix_efficiency=self.matrix_efficiency / slower,
            memory_efficiency=self.memory_efficiency / slower,
            attention_efficiency=self.attention_efficiency / slower,
        )

    def at_speed(self, speed: float) -> "Device":
        """A device that takes 1 / `speed` as long for everything that it computes and copies."""
        return self if speed == 1 else _at_speed(self, speed)


@functools.lru_cache(maxsize=64)
def _at_speed(device: Device, speed: float) -> Device:
    return dataclasses.replace(
        device,
        matrix_flops_per_s=speed * device.matrix_flops_per_s,
        memory_bytes_per_s=speed * device.memory_bytes_per_s,
        kernel_s=device.kernel_s / speed,
        curves=tuple(
            dataclasses.replace(curve, median_s=tuple(seconds / speed for seconds in curve.median_s))
            for curve in device.curves
        ),
    )


class LinkCurve(NamedTuple):
    """How long links take for one kind of collective."""

    alpha_s: float  # of one collective
    efficiency: float = 1.0  # share of the published rate that long messages reach
    ramp_s: float = 0.0  # see plan/task_times.py


class LinkRates(NamedTuple):
    """The links of devices in a row: their rates in each direction, relative to the level's published one."""

    devices: int
    send: float = 1.0
    receive: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links that connect groups of `devices` neighbours."""

    name: str
    devices: int
    # published, all links of a device together; its share of a shared network adapter; that of the slowest of `rates`
    bytes_per_s: float
    ring: LinkCurve  # gathers, sums and sends
    all_to_all: LinkCurve | None = None  # None: as `ring`
    message_s: float = 1e-6  # to send one more message in the same collective
    congestion: float = 0.0  # how much longer messages take for each doubling of the nodes or slices that they join
    dimensions: int | None = None  # of a torus or a mesh; None: all devices are equally far from each other
    wraps: bool = False  # whether links wrap around, as in a torus
    rates: tuple[LinkRates, ...] = ()  # of all devices of the cluster; (): all are alike

    @property
    def slowest(self) -> float:
        """The slowest of `rates`, which `bytes_per_s` is the rate of: whatever all devices send alike waits for it."""
        return min((min(send, receive) for _, send, receive in self.rates), default=1.0)

    @property
    def line(self) -> Linear:
        """The model by bytes that leave a device over all its links, as in a ring."""
        return self._line(self.ring, self.bytes_per_s)

    @property
    def exchange_line(self) -> Linear:
        """The model of all-to-alls, apart from distances on a torus."""
        return self._line(self.all_to_all or self.ring, self.bytes_per_s)

    def exchange(self, ranks: int) -> Linear:
        """The model by bytes that leave a device in an all-to-all over this many neighbours.

        On a torus of d dimensions, half of all rows cross the middle of each dimension: in a cube of side s they have
        s^(d-1) links of 1/2d of a device's rate each, and twice as many if the torus wraps around.
        """
        side = ranks ** (1 / self.dimensions) if self.dimensions else 1.0
        if ranks < 2 or not self.dimensions:
            return self.exchange_line
        wraps = 2 if self.wraps and ranks == self.devices else 1
        published = self.bytes_per_s * (1 if self.wraps else 2)  # a mesh's devices have half of the rate on average
        crossing = 2 * wraps * published / (self.dimensions * side) * (ranks - 1) / ranks
        return self._line(self.all_to_all or self.ring, min(self.bytes_per_s, crossing))

    def exchange_seconds(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-to-all in which `num_bytes` leave each of `ranks` neighbours."""
        return self.exchange(ranks).seconds(num_bytes)

    def with_equal_links(self) -> "Level":
        """This level with all links as fast as published."""
        return dataclasses.replace(self, bytes_per_s=self.bytes_per_s / self.slowest, rates=())

    def slower(self, factor: float) -> "Level":
        """These links at the rate divided by `factor`."""
        return dataclasses.replace(self, bytes_per_s=self.bytes_per_s / factor)

    @staticmethod
    def _line(curve: LinkCurve, bytes_per_s: float) -> Linear:
        return Linear(curve.alpha_s, 1 / (bytes_per_s * curve.efficiency), curve.ramp_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A number of devices and their links: `levels` from the fastest links, in the smallest groups, to all devices."""

    name: str
    device: Device
    devices: int
    levels: tuple[Level, ...]
    interference: Interference = NO_INTERFERENCE  # between compute and communication of a device
    launch_overhead: LaunchOverhead = NO_OVERHEAD  # compute time that each collective costs
    ranks_per_adapter: float = 1.0  # neighbours that share a network adapter
    curves: tuple[Curve, ...] = ()  # measured collectives, used instead of levels
    # devices in a row, and their speed relative to `device`, at most 1; (): all are as fast
    speeds: tuple[tuple[int, float], ...] = ()

    @property
    def node_devices(self) -> int:
        """The number of neighbours that the fastest links connect: those of a node or slice."""
        return self.levels[0].devices

    def level(self, ranks: int) -> Level:
        """The links that a group of this many neighbours has to use, at the rate that they reach between so many."""
        found = next((level for level in self.levels if ranks <= level.devices), self.levels[-1])
        return _congested(found, math.ceil(ranks / self.node_devices))

    def with_equal_links(self) -> "Cluster":
        """The cluster with all links of a level as fast as published."""
        return dataclasses.replace(self, levels=tuple(level.with_equal_links() for level in self.levels))

    def simulated(self) -> "Cluster":
        """The cluster of devices simulated in one process.

        The cores that would compute also copy what a device sends, so nothing overlaps.
        """
        return dataclasses.replace(self, interference=Interference(slowdown=(_STANDSTILL, _STANDSTILL)))

    @property
    def watts(self) -> float | None:
        """Power of all devices at full load; None if unknown."""
        return None if self.device.watts is None else self.devices * self.device.watts

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all devices; None if unknown."""
        return None if self.device.dollars_per_hour is None else self.devices * self.device.dollars_per_hour


@functools.lru_cache(maxsize=1024)
def _congested(level: Level, nodes: int) -> Level:
    """A level between nodes whose messages take longer the more nodes there are."""
    longer = 1 + level.congestion * math.log2(nodes / 2) if nodes > 2 else 1.0
    return level.slower(longer) if longer > 1 else level


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A kind of cluster, for any available size."""

    device: Device
    unit: int  # devices of a node or host; larger clusters are multiples of it
    unit_name: str
    adapters_per_unit: int | None
    largest_slice: int | None  # devices; None: there are nodes but no slices
    torus: int | None  # larger slices have a multiple of this many devices, smaller ones half of it, a quarter, …
    variation: float = 0.0  # standard deviation of the devices' speeds, relative to their mean
    levels: Callable[[int, int], tuple[Level, ...]]  # by the numbers of all devices, and of a slice or node's
