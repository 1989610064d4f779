"""The matrix rate that this machine reaches, as the yardstick for model FLOP utilisation (MFU)."""

import time

import jax
import jax.numpy as jnp

_WIDTH = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
_RUNS = 10


def matrix_flops_per_s(dtype: str) -> float:
    """Floating-point operations per second of a square matrix product, on all devices of all processes.

    The best of several rounds, as others who use the processor only make it slower; still, on CPUs it is no more than
    about right. Simulated CPU devices share the processor: they count as one. Takes about a second.
    """
    device = jax.local_devices()[0]
    width = _WIDTH[device.platform]
    x = jax.device_put(jnp.ones((width, width), dtype), device)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    sharers = jax.process_count() if device.platform == "cpu" else jax.device_count()
    return 2 * width**3 / min(seconds) * sharers
