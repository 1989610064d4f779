"""TPU slices, and several of them over the data-centre network (DCN).

The source, unless a comment names another, is Google Cloud's page of each version (cloud.google.com/tpu/docs/v5p and so
on). Devices are chips, also in `v4-8` and `v5p-8`, where Google counts two TensorCores of each; tpu7x has two devices
per chip, which share its rates.

Alphas, efficiencies, and watts without a source are estimates. Dollars are assumptions for comparing costs, near list
prices of on-demand use.
"""

from typing import NamedTuple

from moe_jax.plan.clusters.hardware import Device, Level, Preset

_ICI_ALPHA_S, _DCN_ALPHA_S = 5e-6, 50e-6
_ICI_EFFICIENCY = 0.9  # a v5p link reaches 90 of 100 GB/s in one direction (Austin et al., How to Scale Your Model)
_DCN_EFFICIENCY = 0.8
_MATRIX_EFFICIENCY = 0.85


class _Chip(NamedTuple):
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


_CHIPS = {
    # 2400 Gbit/s of ICI; DCN as v5p's: an estimate; 192 W: Jouppi et al. 2023 (TPU v4), table 4
    "v4": _Chip(32, 275, 1228, 300, 6.25, 3, 64, 4096, 4, None, 192, 3.2),
    # 1600 Gbit/s; two adapters of 100 Gbit/s for eight chips
    "v5e": _Chip(16, 197, 819, 200, 3.125, 2, 256, 256, 4, 1, 200, 1.2),
    # 1200 GB/s in both directions; 50 Gbit/s of DCN
    "v5p": _Chip(95, 459, 2765, 600, 6.25, 3, 64, 6144, 4, None, 450, 4.2),
    # 3584 Gbit/s (3200 in the page's later versions); four adapters of 200 Gbit/s for eight chips
    "v6e": _Chip(32, 918, 1638, 448, 12.5, 2, 256, 256, 4, 2, 300, 2.7),
    # per chip: 192 GiB, 2307 TFLOP/s, 7380 GB/s, 1200 GB/s in both directions, 100 Gbit/s of DCN
    "tpu7x": _Chip(96, 1153, 3690, 300, 6.25, 3, 128, 18432, 8, None, 500, 6.0),
}


def _preset(name: str, chip: _Chip) -> Preset:
    def levels(devices: int, slice_devices: int) -> tuple[Level, ...]:
        wraps = slice_devices >= chip.whole_torus  # else devices on the surface lack links, at a corner half of them
        ici = Level(
            name="ICI",
            devices=slice_devices,
            alpha_s=_ICI_ALPHA_S,
            bytes_per_s=chip.ici_gb_per_s * 1e9 / (1 if wraps else 2),
            efficiency=_ICI_EFFICIENCY,
            dimensions=chip.dimensions,
            wraps=wraps,
        )
        dcn = Level(
            name="DCN",
            devices=devices,
            alpha_s=_DCN_ALPHA_S,
            bytes_per_s=chip.dcn_gb_per_s * 1e9,
            efficiency=_DCN_EFFICIENCY,
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
