"""The bytes of float32 numbers as bfloat16 or float16 numbers from 0 to 255, which one collective sends with others.

All bits arrive, and a number is never one that compilers treat apart. n numbers, m = 4n of their bytes, P ranks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

PARTS = 4  # numbers for one of float32


def to_byte_numbers(x_n: Float32[Array, " n"], dtype: str) -> Float[Array, " m"]:
    """Return the lowest bytes of all numbers, then their second bytes, and so on."""
    bits_n = jax.lax.bitcast_convert_type(x_n, jnp.uint32)
    return jnp.concatenate([(bits_n >> 8 * place & 255).astype(dtype) for place in range(PARTS)])


def from_byte_numbers(byte_Pn: Float[Array, "P m"]) -> Float32[Array, "P n"]:
    """Return the numbers of each rank."""
    parts = [part_Pn.astype(jnp.uint32) << 8 * place for place, part_Pn in enumerate(jnp.split(byte_Pn, PARTS, axis=1))]
    return jax.lax.bitcast_convert_type(parts[0] | parts[1] | parts[2] | parts[3], jnp.float32)
