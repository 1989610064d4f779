"""The small functions that every block uses.

B sequences, N tokens of each, D model width, H heads, K head width, F hidden width, R rows.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.parallel.tensor_axis import share_of_sum

Product = Callable[[jax.Array, jax.Array], jax.Array]
OfRows = Callable[[jax.Array], jax.Array]


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """x / rms(x) · scale, computed in float32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * scale).astype(x.dtype)


def rotate(x_BNHK: Float[Array, "B N H K"], position_BN: Int[Array, "B N"], theta: float) -> Float[Array, "B N H K"]:
    """Rotary position embedding (Su et al. 2021) on pairs (i, i + K/2), angles in float32."""
    half = x_BNHK.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position_BN[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x_BNHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BNHK.dtype)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in the precision of x."""
    return x @ w.astype(x.dtype)


def mlp(
    params: Mapping[str, jax.Array], x: jax.Array, product: Product = matmul, of_rows: OfRows = lambda vector: vector
) -> jax.Array:
    """SwiGLU where there is a gate matrix, else GELU; of a part of the hidden width its part of the result.

    `product(rows, matrix)` multiplies rows by their matrix, and `of_rows(vector)` is what a bias adds to each.
    """

    def linear(x: jax.Array, name: str) -> jax.Array:
        y, bias = product(x, params[name]), params.get(f"{name}_bias")
        if bias is None:
            return y
        return y + of_rows(share_of_sum(bias) if name == "down" else bias).astype(y.dtype)

    up = linear(x, "up")
    hidden = jax.nn.silu(linear(x, "gate")) * up if "gate" in params else jax.nn.gelu(up)
    return linear(hidden, "down")


def batched_mlp(params: Mapping[str, jax.Array], x_LRD: Float[Array, "L R D"]) -> Float[Array, "L R D"]:
    """Each of L MLPs on rows of its own."""
    return mlp(params, x_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)), lambda bias: bias[:, None])
