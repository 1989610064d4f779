"""Measure the peak rates of this machine: matrix products, the reference for model FLOP utilisation (MFU), and copies,
the reference for memory-bound operations.

The result is the best of several rounds, since other users of the machine only slow it down; even so, CPU rates are
approximate.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_WIDTH = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
_COPIED = {"cpu": 2**26, "gpu": 2**31, "tpu": 2**30}  # bytes, larger than any cache
_ROUNDS = 10
_CALLS = {"cpu": 1, "gpu": 8, "tpu": 8}  # per round: the host starts the next call while one runs


def matrix_flops_per_s(dtype: str) -> float:
    """Return the floating-point operations per second of a square matrix product, on all devices of all processes.

    Simulated CPU devices share the processor and count as one. Takes about a second.
    """
    device = jax.local_devices()[0]
    width = _WIDTH[device.platform]
    # random, since constant operands take less power and run at a higher clock
    numbers = np.random.default_rng(0).standard_normal((width, width), np.float32)
    x = jax.device_put(numbers.astype(jnp.dtype(dtype)), device)
    sharers = jax.process_count() if device.platform == "cpu" else jax.device_count()
    return 2 * width**3 / _seconds(lambda x: jnp.matmul(x, x), x) * sharers


def memory_bytes_per_s() -> float:
    """Return the bytes read and written per second by a copy in the memory of one device."""
    device = jax.local_devices()[0]
    x = jax.device_put(jnp.ones(_COPIED[device.platform] // 4), device)
    return 2 * x.nbytes / _seconds(jnp.negative, x)  # XLA would remove a plain copy


def _seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the time of one call in the best round."""
    calls = _CALLS[next(iter(x.devices())).platform]
    function = jax.jit(function)
    function(x).block_until_ready()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(x)
        result.block_until_ready()
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)
