"""What the iterations of a scan over blocks save for the backward pass: on the device, or in host memory.

With `schedule.offload_activations` the large values of an iteration are copied to the host while the next iteration
computes, and back while the iteration above it runs its backward tasks. A device has those of two iterations. Those of
the last iteration of the forward scan, which the backward scan reads first, stay.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moe_jax.parallel.host_memory import to_device, to_host

LARGE_BYTES = 2**20  # smaller values of an iteration stay on the device


class SavedValues:
    """The saved values of the iterations of one forward scan, which each have the same `shapes`."""

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], offload: bool):
        """`offload`: large values are in host memory."""
        self._shapes = shapes
        self._goes = [offload and math.prod(x.shape) * x.dtype.itemsize >= LARGE_BYTES for x in shapes]
        self.stacks: list[jax.Array] = []  # results of the forward scan, a leaf for each value
        self.last: list[jax.Array] = []  # large values of the last iteration

    def before_first(self) -> list[jax.Array]:
        """Return the carry of the forward scan: large values of the iteration before, of which there is none."""
        return [jnp.zeros(x.shape, x.dtype) for x, goes in zip(self._shapes, self._goes, strict=True) if goes]

    def store(
        self, values: Sequence[jax.Array], before: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return what an iteration stacks, and its next carry: large values are stacked by the next iteration."""
        waiting = iter(before)
        stacked = [to_host(next(waiting)) if goes else x for x, goes in zip(values, self._goes, strict=True)]
        return stacked, [x for x, goes in zip(values, self._goes, strict=True) if goes]

    def fetch(self, iteration: int | jax.Array) -> list[jax.Array]:
        """Return the large values of an iteration below the last one."""
        own = (stack for stack, goes in zip(self.stacks, self._goes, strict=True) if goes)
        return [to_device(_row(stack, iteration + 1)) for stack in own]

    def values(self, iteration: int | jax.Array, fetched: Sequence[jax.Array]) -> list[jax.Array]:
        """Return all values of an iteration, of which the large ones were fetched."""
        large = iter(fetched)
        pairs = zip(self.stacks, self._goes, strict=True)
        return [next(large) if goes else _row(stack, iteration) for stack, goes in pairs]


def _row(stack: jax.Array, iteration: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, iteration, keepdims=False)
