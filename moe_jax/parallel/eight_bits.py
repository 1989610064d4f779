"""Numbers of 8 bits that share scales, and such numbers as bytes that can be sent."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

_LARGEST = {jnp.float8_e4m3fn: 2.0**8, jnp.float8_e5m2: 2.0**15}  # powers of 2; 1.5 times these is in range, too
_SMALLEST_SCALE = 2.0**-100  # for rows of 0
_OF_MATRIX = (-2, -1)
_SCALE_BYTES = 4


class Quantized(NamedTuple):
    """8-bit numbers, and their scale in the dtype that the numbers had."""

    numbers: Array
    scale: Array

    def wide(self) -> Array:
        """Return the numbers in the dtype of the scale, not yet multiplied by it."""
        return self.numbers.astype(self.scale.dtype)


def quantize(x: Float[Array, "..."], to: Any, axes: int | tuple[int, ...]) -> Quantized:
    """Round x to 3 bits of mantissa (e4m3) or 2 (e5m2), with one scale along `axes`.

    If a number is not finite, all numbers that share its scale become NaN.
    """
    wide = x.astype(jnp.float32)
    nearest = jax.lax.reduce_precision(jnp.max(jnp.abs(wide), axes, keepdims=True), exponent_bits=8, mantissa_bits=0)
    scale = jnp.maximum(nearest / _LARGEST[to], _SMALLEST_SCALE)
    # with a barrier: XLA may merge this cast with the next, and so skip the rounding (simplify-fp-conversions)
    numbers = jax.lax.optimization_barrier((wide / scale).astype(to))
    return Quantized(numbers, scale.astype(x.dtype))


def to_bytes(x: Float[Array, "... A B"]) -> UInt8[Array, " n"]:
    """Return matrices rounded to e4m3, each with a scale of its own: all numbers, and after them the scales."""
    numbers, scale = quantize(x, jnp.float8_e4m3fn, _OF_MATRIX)
    parts = numbers, scale.astype(jnp.float32)
    return jnp.concatenate([jax.lax.bitcast_convert_type(part, jnp.uint8).ravel() for part in parts])


def count_bytes(shape: tuple[int, ...]) -> int:
    """Return n, of matrices of this shape."""
    return math.prod(shape) + _SCALE_BYTES * math.prod(shape[:-2])


def from_bytes(byte_Pn: UInt8[Array, "P n"], shape: tuple[int, ...], dtype: str) -> Float[Array, "P m"]:
    """Return the numbers of P times `to_bytes` of matrices of this shape, flat."""
    ranks, size = len(byte_Pn), math.prod(shape)
    numbers = jax.lax.bitcast_convert_type(byte_Pn[:, :size], jnp.float8_e4m3fn).reshape(ranks, *shape)
    scale_bytes = byte_Pn[:, size:].reshape(ranks, *shape[:-2], 1, 1, _SCALE_BYTES)
    scale = jax.lax.bitcast_convert_type(scale_bytes, jnp.float32)
    return (numbers.astype(dtype) * scale.astype(dtype)).reshape(ranks, size)
