"""Cutting rows into chunks whose transfers follow each other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe_jax.parallel.ordering import after

_SLOTS = -2  # the dimension that counts rows, in front of their features


class Chunking(NamedTuple):
    """Into how many chunks rows are cut, on which platform."""

    chunks: int
    platform: str  # cpu, gpu or tpu


def cut(x: Shaped[Array, "..."], chunking: Chunking) -> list[jax.Array]:
    """Chunks of rows as equal as possible, none of them empty; sizes [P, L] are one chunk."""
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return [x]
    rows = x.shape[_SLOTS]
    chunks = max(min(chunking.chunks, rows), 1)
    return jnp.split(x, [rows * i // chunks for i in range(1, chunks)], axis=_SLOTS)


def join(chunks: list[jax.Array]) -> jax.Array:
    """The rows of all chunks, once the last one is there."""
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=_SLOTS)


class Places:
    """Memory for all rows, filled chunk by chunk."""

    def __init__(self, x: Shaped[Array, "..."]):
        self._rows = x.shape[_SLOTS]
        self._filled = 0
        self._target: jax.Array | None = None

    def add(self, chunk: jax.Array) -> jax.Array:
        """Copy the next chunk behind those before; returns all rows so far."""
        if chunk.ndim < 3 or chunk.shape[_SLOTS] == self._rows:
            return chunk
        dim = chunk.ndim + _SLOTS
        if self._target is None:
            shape = (*chunk.shape[:dim], self._rows, *chunk.shape[dim + 1 :])
            self._target = jax.lax.empty(shape, chunk.dtype)
        self._target = jax.lax.dynamic_update_slice_in_dim(self._target, chunk, self._filled, axis=dim)
        self._filled += chunk.shape[dim]
        return self._target


def in_order(x: jax.Array, earlier: jax.Array | None, platform: str) -> jax.Array:
    """`x`, but not before `earlier` exists."""
    return x if earlier is None or not x.size or not earlier.size else after(x, earlier, platform)


def side_by_side(*results: jax.Array) -> list[jax.Array]:
    """Results of transfers that are to be under way at the same time: none is used before all are there.

    By itself XLA:GPU runs one after another.
    """
    return list(jax.lax.optimization_barrier(results))
