"""Arrays in memory of the host that devices read and write themselves. On CPUs it is the devices' memory.

XLA copies them asynchronously, and slices of them, too.
"""

from collections.abc import Sequence

import jax

PINNED = "pinned_host"  # jax's name of this memory


def to_device(x: jax.Array) -> jax.Array:
    """Return an array in the device's memory. Runs inside jit."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_memory_of(other: jax.Array, x: jax.Array) -> jax.Array:
    """Return an array in the memory that another one is in. Runs inside jit."""
    return jax.device_put(x, jax.typeof(other).memory_space)


def after(arrays: Sequence[jax.Array], first: jax.Array) -> list[jax.Array]:
    """Return the same arrays, which nothing reads before `first` exists. Not for CPUs, whose compiler drops it."""
    return list(jax.lax.optimization_barrier((*arrays, first))[:-1])
