"""CPU devices, simulated ones too: one core each, on a local network. Round numbers, as in `plan/costs.py`."""

from moe_jax.plan.clusters.hardware import Device, Level, LinkCurve, Preset
from moe_jax.plan.costs import TYPICAL

_CPU = TYPICAL["cpu"]
_MEMORY_BYTES_PER_S = 5e9  # a core's share of the socket


def _levels(devices: int, _: int) -> tuple[Level, ...]:
    link = _CPU.link
    ring = LinkCurve(link.alpha_s)
    return (Level(name="local network", devices=devices, bytes_per_s=1 / link.beta_s, ring=ring),)


CPUS = {
    "cpu": Preset(
        device=Device(
            name="CPU core",
            platform="cpu",
            memory_bytes=None,
            matrix_flops_per_s=_CPU.flops_per_s,
            memory_bytes_per_s=_MEMORY_BYTES_PER_S,
            matrix_efficiency=1.0,
            watts=None,
            dollars_per_hour=None,
        ),
        unit=1,
        unit_name="core",
        adapters_per_unit=None,
        largest_slice=None,
        torus=None,
        levels=_levels,
    )
}
