"""Nodes of GPUs, and the network between them.

Rates are from data sheets: dense bfloat16, links in one direction. Alphas and efficiencies are estimates. Dollars are
assumptions for comparing costs, near the prices of clouds in 2025. Watts are those of the GPU alone.
"""

from dataclasses import replace
from typing import NamedTuple

from moe_jax.config.attention_kernels import Capability
from moe_jax.plan.clusters.hardware import Device, Level, LinkCurve, MatrixUnits, Preset, RateShares, Tile

_ALL = 2**40  # devices: no limit
_TRAY, _RACK = 4, 72  # GPUs of an NVL72's trays, and of a whole one
_CONGESTION = 0.04
_MEMORY_EFFICIENCY = 0.85
_ATTENTION_EFFICIENCY = 0.55
_KERNEL_S = 4e-6
_VARIATION = 0.01
_TILES = (Tile(128, 256, 1.0), Tile(128, 128, 0.9), Tile(64, 128, 0.7), Tile(64, 64, 0.45))


class _GpuChip(NamedTuple):
    """What GPUs of a generation have in common. Multiprocessors and shares are from data sheets."""

    capability: Capability | None  # CUDA's compute capability; None: not NVIDIA's
    multiprocessors: int
    start: int  # see MatrixUnits
    shares: RateShares  # relative to dense bfloat16
    matrix_efficiency: float = 0.75


_VOLTA = _GpuChip((7, 0), 80, 64, RateShares(15.7 / 125, 15.7 / 125), 0.7)
_TURING = _GpuChip((7, 5), 68, 64, RateShares(0.25, 0.25), 0.7)
_GA100 = _GpuChip((8, 0), 108, 128, RateShares(0.5, 19.5 / 312), 0.8)
_GA102 = _GpuChip((8, 6), 82, 64, RateShares(0.5, 0.5), 0.7)
_HOPPER = _GpuChip((9, 0), 132, 192, RateShares(0.5, 67 / 989, 2.0))
_BLACKWELL = _GpuChip((10, 0), 148, 384, RateShares(0.5, 75 / 2250, 2.0))
_CDNA2 = _GpuChip(None, 110, 128, RateShares(0.25, 0.25), 0.6)
_CDNA3 = _GpuChip(None, 304, 192, RateShares(0.5, 0.125, 2.0), 0.5)


def _device(
    name: str,
    chip: _GpuChip,
    memory_bytes: float,
    tflops: float,
    memory_gb_per_s: float,
    watts: float,
    dollars_per_hour: float,
) -> Device:
    return Device(
        name=name,
        platform="gpu",
        memory_bytes=int(memory_bytes),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        memory_efficiency=_MEMORY_EFFICIENCY,
        matrix_flops_per_s=tflops * 1e12,
        matrix_efficiency=chip.matrix_efficiency,
        attention_efficiency=_ATTENTION_EFFICIENCY,
        capability=chip.capability,
        units=MatrixUnits(chip.multiprocessors, _TILES, chip.start),
        rate_shares=chip.shares,
        kernel_s=_KERNEL_S,
        watts=watts,
        dollars_per_hour=dollars_per_hour,
    )


def _nodes(device: Device, adapters: int, *levels: Level) -> Preset:
    """A preset with `levels` of links from the node up, each with its reach in the largest cluster."""

    def reaching(devices: int, _: int) -> tuple[Level, ...]:
        needed = 1 + next(i for i, level in enumerate(levels) if devices <= level.devices)
        return tuple(replace(level, devices=min(level.devices, devices)) for level in levels[:needed])

    return Preset(
        device=device,
        variation=_VARIATION,
        unit=levels[0].devices,
        unit_name="node",
        adapters_per_unit=adapters,
        largest_slice=None,
        torus=None,
        levels=reaching,
    )


def _racks(device: Device, nvlink_gb_per_s: float, adapter_gb_per_s: float) -> Preset:
    """A preset of racks in which NVLink joins up to 72 GPUs, in trays of four with an adapter for each GPU.

    A larger cluster uses the most GPUs of each rack that divide its number.
    """

    def reaching(devices: int, _: int) -> tuple[Level, ...]:
        trays = range(_TRAY, _RACK + 1, _TRAY)
        joined = max((each for each in trays if devices % each == 0), default=devices)
        inside = _nvlink(nvlink_gb_per_s, joined)
        return (inside,) if joined == devices else (inside, replace(_infiniband(adapter_gb_per_s), devices=devices))

    return Preset(
        device=device,
        variation=_VARIATION,
        unit=_TRAY,
        unit_name="tray",
        adapters_per_unit=_TRAY,
        largest_slice=None,
        torus=None,
        levels=reaching,
    )


def _nvlink(gb_per_s: float, devices: int = 8) -> Level:
    """The links of a node of GPUs, as NCCL uses them."""
    return Level(
        name="NVLink",
        devices=devices,
        bytes_per_s=gb_per_s * 1e9,
        ring=LinkCurve(17e-6, 0.76, 3e-6),
        all_to_all=LinkCurve(12e-6, 0.76, 2e-6),
    )


def _pcie(devices: int, gb_per_s: float) -> Level:
    """Links through the host's memory, which all GPUs of a node share: the efficiencies are estimates."""
    return Level(
        name="PCIe",
        devices=devices,
        bytes_per_s=gb_per_s * 1e9,
        ring=LinkCurve(20e-6, 0.35, 4e-6),
        all_to_all=LinkCurve(20e-6, 0.5, 4e-6),
    )


def _infinity_fabric(gb_per_s: float, efficiency: float) -> Level:
    """The links of a node of AMD's GPUs."""
    return Level(name="Infinity Fabric", devices=8, bytes_per_s=gb_per_s * 1e9, ring=LinkCurve(20e-6, efficiency, 4e-6))


def _infiniband(gb_per_s: float) -> Level:
    """A GPU's share of the node's network adapters."""
    return Level(
        name="InfiniBand",
        devices=_ALL,
        bytes_per_s=gb_per_s * 1e9,
        ring=LinkCurve(60e-6, 0.85, 20e-6),
        all_to_all=LinkCurve(30e-6, 0.74, 3e-6),
        message_s=1.5e-6,
        congestion=_CONGESTION,
    )


def _efa(gb_per_s: float) -> Level:
    """A GPU's share of a node's Elastic Fabric Adapters. Its start-up time is an estimate."""
    return Level(
        name="EFA",
        devices=_ALL,
        bytes_per_s=gb_per_s * 1e9,
        ring=LinkCurve(80e-6, 0.8, 20e-6),
        message_s=5e-6,
        congestion=_CONGESTION,
    )


def _slingshot(name: str, devices: int, gb_per_s: float) -> Level:
    """A die's share of the node's Slingshot adapters."""
    return Level(
        name=name,
        devices=devices,
        bytes_per_s=gb_per_s * 1e9,
        ring=LinkCurve(60e-6, 0.8, 20e-6),
        message_s=5e-6,
        congestion=_CONGESTION,
    )


_A100 = _device("A100 SXM 80GB", _GA100, 80 * 2**30, 312, 2039, 400, 1.8)
_V100 = _device("V100 SXM2 32GB", _VOLTA, 32 * 2**30, 125, 900, 300, 0.7)
GPUS = {
    # NVIDIA A100 80GB data sheet: NVLink 600 GB/s in both directions; DGX A100: 8 adapters of 200 Gbit/s
    "a100": _nodes(_A100, 8, _nvlink(300), _infiniband(25)),
    # NVIDIA H100 SXM data sheet: NVLink 900 GB/s; DGX H100: 8 adapters of 400 Gbit/s; memory as the driver reports it
    "h100": _nodes(_device("H100 SXM", _HOPPER, 84978434048, 989, 3350, 700, 2.8), 8, _nvlink(450), _infiniband(50)),
    # NVIDIA H200 SXM data sheet; network as H100
    "h200": _nodes(_device("H200 SXM", _HOPPER, 151397597184, 989, 4800, 700, 3.5), 8, _nvlink(450), _infiniband(50)),
    # DeepSeek-V3 2024, section 3.1: H100s with NVLink at 400 GB/s in both directions; network as H100
    "h800": _nodes(_device("H800 SXM", _HOPPER, 84978434048, 989, 3350, 700, 2.6), 8, _nvlink(200), _infiniband(50)),
    # NVIDIA DGX B200 data sheet: 72 PFLOP/s in sparse FP8, a quarter of it in dense bfloat16, over 8 GPUs; of a GPU
    # 180 GB, 8 TB/s, NVLink 1800 GB/s in both directions; 8 adapters of 400 Gbit/s
    "b200": _nodes(_device("B200 SXM", _BLACKWELL, 180e9, 2250, 8000, 1000, 5.0), 8, _nvlink(900), _infiniband(50)),
    # NVIDIA GB200 and GB300 NVL72 data sheets: 360 PFLOP/s in sparse bfloat16, half of it dense, over 72 GPUs; of a GPU
    # 186 and 279 GB, 8 TB/s, NVLink 1800 GB/s in both directions, an adapter of 400 and 800 Gbit/s
    "gb200": _racks(_device("GB200", _BLACKWELL, 186e9, 2500, 8000, 1200, 6.0), 900, 50),
    "gb300": _racks(_device("GB300", _BLACKWELL, 279e9, 2500, 8000, 1400, 7.0), 900, 100),
    # NVIDIA GA102 whitepaper: 71 TFLOP/s with float32 sums, 936 GB/s. FlowMoE's cluster 1 has 16 of them; nodes of 8 on
    # PCIe 3.0 ×16 (15.75 GB/s) and one adapter of 100 Gbit/s for a node: an assumption
    "rtx3090": _nodes(
        _device("RTX 3090", _GA102, 24 * 2**30, 71, 936, 350, 0.25), 1, _pcie(8, 15.75), _infiniband(12.5 / 8)
    ),
    # NVIDIA TU102 whitepaper: 53.8 TFLOP/s in float16 with float32 sums, no bfloat16; 616 GB/s. Nodes of 4 on
    # PCIe 3.0 ×16 and one adapter of 100 Gbit/s for a node: an assumption
    "rtx2080ti": _nodes(
        _device("RTX 2080 Ti", _TURING, 11 * 2**30, 53.8, 616, 250, 0.12), 1, _pcie(4, 15.75), _infiniband(12.5 / 4)
    ),
    # Piper's Frontier; a device is one of an MI250X's two dies. AMD data sheet, halved: 383 TFLOP/s, 128 GB, 3277 GB/s,
    # 560 W. Node: all-to-alls reach 50 GB/s (Piper, on expert migration). Group of a dragonfly, a cabinet of 128 nodes:
    # 4 adapters of 200 Gbit/s for a node (OLCF Frontier user guide). Between groups 1/1.75 of that: 4 links to each
    "mi250x": _nodes(
        _device("MI250X die", _CDNA2, 64 * 2**30, 191.5, 1638, 280, 0.8),
        4,
        _infinity_fabric(50, 1.0),
        _slingshot("Slingshot", 1024, 12.5),
        _slingshot("Slingshot between groups", _ALL, 12.5 / 1.75),
    ),
    # NVIDIA A800 80GB data sheet: an A100 with NVLink at 400 GB/s in both directions; network as A100
    "a800": _nodes(replace(_A100, name="A800 SXM 80GB", dollars_per_hour=1.6), 8, _nvlink(200), _infiniband(25)),
    # AWS: p4de.24xlarge has eight A100 80GB and 400 Gbit/s of network for all of them, in four adapters
    "p4de": _nodes(_A100, 4, _nvlink(300), _efa(6.25)),
    # NVIDIA V100 SXM2 32GB data sheet: 125 TFLOP/s in float16, no bfloat16; 900 GB/s, NVLink 300 GB/s in both
    # directions; DGX-1: 4 adapters of 100 Gbit/s
    "v100": _nodes(_V100, 4, _nvlink(150), _infiniband(6.25)),
    # AWS: p3dn.24xlarge has eight V100 32GB and one adapter of 100 Gbit/s for all of them
    "p3dn": _nodes(_V100, 1, _nvlink(150), _efa(12.5 / 8)),
    # AMD MI300X data sheet: 1307 TFLOP/s, 192 GB, 5.3 TB/s, 750 W; a link of 128 GB/s in both directions to each of the
    # seven other GPUs of a node. 8 adapters of 400 Gbit/s: an assumption
    "mi300x": _nodes(
        _device("MI300X", _CDNA3, 192e9, 1307, 5300, 750, 3.0), 8, _infinity_fabric(448, 0.7), _infiniband(50)
    ),
}
