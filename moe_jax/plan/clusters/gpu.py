"""Nodes of GPUs, and the network between them.

Rates are from data sheets: dense bfloat16, links in one direction. Alphas and efficiencies are estimates. Dollars are
assumptions for comparing costs, near the prices of clouds in 2025. Watts are those of the GPU alone.
"""

from dataclasses import replace

from moe_jax.plan.clusters.hardware import Device, Level, Preset

_ALL = 2**40  # devices: no limit


def _device(
    name: str,
    memory_bytes: float,
    tflops: float,
    memory_gb_per_s: float,
    watts: float,
    dollars_per_hour: float,
    matrix_efficiency: float = 0.75,
) -> Device:
    return Device(
        name=name,
        platform="gpu",
        memory_bytes=int(memory_bytes),
        matrix_flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        matrix_efficiency=matrix_efficiency,
        watts=watts,
        dollars_per_hour=dollars_per_hour,
    )


def _level(name: str, devices: int, alpha_s: float, gb_per_s: float, efficiency: float) -> Level:
    return Level(name=name, devices=devices, alpha_s=alpha_s, bytes_per_s=gb_per_s * 1e9, efficiency=efficiency)


def _nodes(device: Device, adapters: int, *levels: Level) -> Preset:
    """A preset with `levels` of links from the node up, each with its reach in the largest cluster."""

    def reaching(devices: int, _: int) -> tuple[Level, ...]:
        needed = 1 + next(i for i, level in enumerate(levels) if devices <= level.devices)
        return tuple(replace(level, devices=min(level.devices, devices)) for level in levels[:needed])

    return Preset(
        device=device,
        unit=levels[0].devices,
        unit_name="node",
        adapters_per_unit=adapters,
        largest_slice=None,
        torus=None,
        levels=reaching,
    )


def _nvlink(gb_per_s: float) -> Level:
    """The links of a node of eight GPUs. NCCL's all-to-alls reach about four fifths of the rate: an estimate."""
    return _level("NVLink", 8, 5e-6, gb_per_s, 0.8)


def _infiniband(gb_per_s: float) -> Level:
    """A GPU's share of the node's network adapters."""
    return _level("InfiniBand", _ALL, 10e-6, gb_per_s, 0.85)


def _pcie(devices: int, gb_per_s: float) -> Level:
    """Links through the host's memory, which all GPUs of a node share: the efficiency is an estimate."""
    return _level("PCIe", devices, 15e-6, gb_per_s, 0.5)


GPUS = {
    # NVIDIA A100 80GB data sheet: NVLink 600 GB/s in both directions; DGX A100: 8 adapters of 200 Gbit/s
    "a100": _nodes(_device("A100 SXM 80GB", 80 * 2**30, 312, 2039, 400, 1.8), 8, _nvlink(300), _infiniband(25)),
    # NVIDIA H100 SXM data sheet: NVLink 900 GB/s; DGX H100: 8 adapters of 400 Gbit/s; memory as the driver reports it
    "h100": _nodes(_device("H100 SXM", 84978434048, 989, 3350, 700, 2.8), 8, _nvlink(450), _infiniband(50)),
    # NVIDIA H200 SXM data sheet; network as H100
    "h200": _nodes(_device("H200 SXM", 151397597184, 989, 4800, 700, 3.5), 8, _nvlink(450), _infiniband(50)),
    # NVIDIA DGX B200 data sheet: 72 PFLOP/s in sparse FP8, a quarter of it in dense bfloat16, over 8 GPUs; of a GPU
    # 180 GB, 8 TB/s, NVLink 1800 GB/s in both directions; 8 adapters of 400 Gbit/s
    "b200": _nodes(_device("B200 SXM", 180e9, 2250, 8000, 1000, 5.0), 8, _nvlink(900), _infiniband(50)),
    # NVIDIA GA102 whitepaper: 71 TFLOP/s with float32 sums, 936 GB/s. FlowMoE's cluster 1 has 16 of them; nodes of 8 on
    # PCIe 3.0 ×16 (15.75 GB/s) and one adapter of 100 Gbit/s for a node: an assumption
    "rtx3090": _nodes(
        _device("RTX 3090", 24 * 2**30, 71, 936, 350, 0.25, 0.7), 1, _pcie(8, 15.75), _infiniband(12.5 / 8)
    ),
    # NVIDIA TU102 whitepaper: 53.8 TFLOP/s in float16 with float32 sums, no bfloat16; 616 GB/s. Nodes of 4 on
    # PCIe 3.0 ×16 and one adapter of 100 Gbit/s for a node: an assumption
    "rtx2080ti": _nodes(
        _device("RTX 2080 Ti", 11 * 2**30, 53.8, 616, 250, 0.12, 0.7), 1, _pcie(4, 15.75), _infiniband(12.5 / 4)
    ),
    # Piper's Frontier; a device is one of an MI250X's two dies. AMD data sheet, halved: 383 TFLOP/s, 128 GB, 3277 GB/s,
    # 560 W. Node: all-to-alls reach 50 GB/s (Piper, on expert migration). Group of a dragonfly, a cabinet of 128 nodes:
    # 4 adapters of 200 Gbit/s for a node (OLCF Frontier user guide). Between groups 1/1.75 of that: 4 links to each
    "mi250x": _nodes(
        _device("MI250X die", 64 * 2**30, 191.5, 1638, 280, 0.8, 0.6),
        4,
        _level("Infinity Fabric", 8, 10e-6, 50, 1.0),
        _level("Slingshot", 1024, 15e-6, 12.5, 0.8),
        _level("Slingshot between groups", _ALL, 25e-6, 12.5 / 1.75, 0.8),
    ),
}
