"""A part of `bench_gpu.py`: the properties of the device, and the rates that it reaches."""

import jax
from parts import Put
from results_file import rounded

from moe_jax.measure.microbench import memory_bytes
from moe_jax.measure.peak import matrix_flops_per_s, memory_bytes_per_s


def measure(put: Put) -> None:
    """Measure the first device."""
    device = jax.local_devices()[0]
    put({"platform": device.platform, "device": device.device_kind, "memory_bytes": memory_bytes([device])})
    put({"matrix_flops_per_s": rounded(matrix_flops_per_s("bfloat16"))})
    put({"memory_bytes_per_s": rounded(memory_bytes_per_s())})
