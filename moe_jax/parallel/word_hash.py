"""A hash of 32-bit words, elementwise, which compilers fuse with what reads it."""

import jax
import jax.numpy as jnp


def index_of(shape: tuple[int, ...]) -> jax.Array:
    """Return each element's index in an array of this shape, in row-major order, modulo 2³²."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def mix(word: jax.Array) -> jax.Array:
    """Apply the final mixing of MurmurHash3 (Appleby): it is one-to-one, and every bit depends on all bits."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
