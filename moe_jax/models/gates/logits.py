"""Products from which router logits are computed, in float32. T tokens, D model width, E experts."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_TINY = 1e-12


def linear(params: Any, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """Return router logits in float32, with a bias if the router has one."""
    return product(x_TD, params["router"]) + params.get("router_bias", 0.0)


def product(x: Float[Array, "T n"], matrix: Float[Array, "n m"]) -> Float[Array, "T m"]:
    """Multiply in float32."""
    # by default, TPUs and recent GPUs would multiply in bfloat16 or TF32
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


def unit(x: jax.Array, axis: int) -> jax.Array:
    """Scale vectors along `axis` to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=axis, keepdims=True) + _TINY)
