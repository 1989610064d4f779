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


def place(target: jax.Array | None, chunk: jax.Array, whole: int, start: int) -> jax.Array:
    """`target` (None: anything) of `whole` rows with a chunk's rows from row `start` on."""
    if chunk.ndim < 3 or chunk.shape[_SLOTS] == whole:
        return chunk
    if target is None:
        shape = list(chunk.shape)
        shape[_SLOTS] = whole
        target = jax.lax.empty(tuple(shape), chunk.dtype)
    return jax.lax.dynamic_update_slice_in_dim(target, chunk, start, axis=chunk.ndim + _SLOTS)


def in_order(x: jax.Array, earlier: jax.Array | None, platform: str) -> jax.Array:
    """`x`, but not before `earlier` exists."""
    return x if earlier is None or not x.size or not earlier.size else after(x, earlier, platform)
