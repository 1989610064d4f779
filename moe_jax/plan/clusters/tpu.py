"""TPU slices, and several of them over the data-centre network (DCN).

The source, unless a comment names another, is Google Cloud's page of each version (cloud.google.com/tpu/docs/v5p and so
on). Devices are chips, also in `v4-8` and `v5p-8`, where Google counts two TensorCores of each; tpu7x has two devices
per chip, which share its rates.

Alphas, efficiencies, and watts without a source are estimates. Dollars are assumptions for comparing costs, near list
prices of on-demand use.
"""

import math
from typing import NamedTuple

from moe_jax.plan.clusters.hardware import Device, Level, LinkCurve, MatrixUnits, Preset, RateShares, Tile

_ICI_ALPHA_S, _ICI_RAMP_S, _DCN_ALPHA_S = 9e-6, 0.5e-6, 50e-6
_DCN_MESSAGE_S = 5e-6
_DCN_EFFICIENCY = 0.8
_MATRIX_EFFICIENCY = 0.85
_UNITS = MatrixUnits(1, (Tile(128, 128, 1.0),), 256)
_MEMORY_EFFICIENCY = 0.85
_ATTENTION_EFFICIENCY = 0.5
_KERNEL_S = 1e-6
_EXACT = 1 / 6  # of float32 products as six in bfloat16, jax's highest precision


class _TpuChip(NamedTuple):
    memory_gib: int
    tflops: float
    memory_gb_per_s: float
    ici_gb_per_s: float  # all links together, in one direction
    dcn_gb_per_s: float
    dimensions: int
    whole_torus: int  # devices of the smallest slice that wraps around in each dimension
    largest: int  # devices of the largest slice
    host: int  # devices of a host
    adapters: int | None  # network adapters of a host
    watts: float
    dollars_per_hour: float
    fp8: float = 1.0  # rate in 8-bit floats, relative to bfloat16
    # a v5p link reaches 90 of 100 GB/s in one direction (Austin et al., How to Scale Your Model)
    ici_efficiency: float = 0.9


_CHIPS = {
    # 2400 Gbit/s of ICI; DCN as v5p's: an estimate; 192 W: Jouppi et al. 2023 (TPU v4), table 4
    "v4": _TpuChip(32, 275, 1228, 300, 6.25, 3, 64, 4096, 4, None, 192, 3.2),
    # 1600 Gbit/s; two adapters of 100 Gbit/s for eight chips
    "v5e": _TpuChip(16, 197, 819, 200, 3.125, 2, 256, 256, 4, 1, 200, 1.2),
    # 1200 GB/s in both directions; 50 Gbit/s of DCN
    "v5p": _TpuChip(95, 459, 2765, 600, 6.25, 3, 64, 6144, 4, None, 450, 4.2),
    # 3200 Gbit/s; four adapters of 200 Gbit/s for eight chips; a sum over 256 chips reaches 236 GB/s (tpu-recipes)
    "v6e": _TpuChip(32, 918, 1638, 400, 12.5, 2, 256, 256, 4, 2, 300, 2.7, ici_efficiency=0.6),
    # per chip: 192 GiB, 2307 TFLOP/s (4614 in 8-bit floats), 7380 GB/s, 1200 GB/s in both directions, 100 Gbit/s of DCN
    "tpu7x": _TpuChip(96, 1153, 3690, 300, 6.25, 3, 128, 18432, 8, None, 500, 6.0, 2.0),
}


def _share_of_links(chip: _TpuChip, devices: int) -> float:
    """The share of a chip's links that are used in a slice.

    Without wrap-around, devices on the surface lack links, at a corner half of them. A slice with fewer chips than
    corners of a cube does not extend in all dimensions.
    """
    if devices >= chip.whole_torus:
        return 1.0
    chips = devices * 4 / chip.host  # a host has four chips
    return min(max(math.log2(chips), 1.0) / chip.dimensions, 1.0) / 2


def _preset(name: str, chip: _TpuChip) -> Preset:
    def levels(devices: int, slice_devices: int) -> tuple[Level, ...]:
        wraps = slice_devices >= chip.whole_torus
        ici = Level(
            name="ICI",
            devices=slice_devices,
            bytes_per_s=chip.ici_gb_per_s * 1e9 * _share_of_links(chip, slice_devices),
            ring=LinkCurve(_ICI_ALPHA_S, chip.ici_efficiency, _ICI_RAMP_S),
            dimensions=chip.dimensions,
            wraps=wraps,
        )
        dcn = Level(
            name="DCN",
            devices=devices,
            bytes_per_s=chip.dcn_gb_per_s * 1e9,
            ring=LinkCurve(_DCN_ALPHA_S, _DCN_EFFICIENCY),
            message_s=_DCN_MESSAGE_S,
        )
        return (ici,) if devices == slice_devices else (ici, dcn)

    return Preset(
        device=Device(
            name=f"TPU {name.removeprefix('tpu')}",
            platform="tpu",
            memory_bytes=chip.memory_gib * 2**30,
            matrix_flops_per_s=chip.tflops * 1e12,
            memory_bytes_per_s=chip.memory_gb_per_s * 1e9,
            matrix_efficiency=_MATRIX_EFFICIENCY,
            memory_efficiency=_MEMORY_EFFICIENCY,
            kernel_s=_KERNEL_S,
            attention_efficiency=_ATTENTION_EFFICIENCY,
            units=_UNITS,
            rate_shares=RateShares(1.0, _EXACT, chip.fp8),
            watts=chip.watts,
            dollars_per_hour=chip.dollars_per_hour,
        ),
        unit=chip.host,
        unit_name="host",
        adapters_per_unit=chip.adapters,
        largest_slice=chip.largest,
        torus=chip.whole_torus,
        levels=levels,
    )


TPUS = {name: _preset(name, chip) for name, chip in _CHIPS.items()}

# TensorCores of a device, where Google's names count them: v5p-128 in its names has 64 chips
CORES = {TPUS[name].device.name: 2 for name in ("v4", "v5p")}
