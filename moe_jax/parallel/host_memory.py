"""Arrays in memory of the host that devices read and write themselves. On CPUs it is the devices' memory.

XLA copies them asynchronously, and slices of them, too.
"""

from collections.abc import Sequence
from typing import Any

import jax

from moe_jax.errors import ConfigError

PINNED = "pinned_host"  # jax's name of this memory


def to_device(x: jax.Array) -> jax.Array:
    """Return an array in the device's memory. Runs inside jit."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: jax.Array) -> jax.Array:
    """Return an array in the host's memory. Runs inside jit."""
    return jax.device_put(x, jax.memory.Space.Host)


def check_host_memory(device: Any, setting: str) -> None:
    """Raise ConfigError if a device cannot use memory of its host, which a true setting needs."""
    if PINNED not in (memory.kind for memory in device.addressable_memories()):
        raise ConfigError(
            f"{setting}=true needs host memory that devices use themselves ({PINNED}), and jax "
            f"knows none of {device.device_kind or device.platform}: use {setting}=false"
        )


def to_memory_of(other: jax.Array, x: jax.Array) -> jax.Array:
    """Return an array in the memory that another one is in. Runs inside jit."""
    return jax.device_put(x, jax.typeof(other).memory_space)


def after(arrays: Sequence[jax.Array], first: jax.Array) -> list[jax.Array]:
    """Return the same arrays, which nothing reads before `first` exists. Not for CPUs, whose compiler drops it."""
    return list(jax.lax.optimization_barrier((*arrays, first))[:-1])
