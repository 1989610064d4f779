"""The small functions that every block uses.

D model width, F hidden width, R rows.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.parallel.tensor_axis import share_of_sum

Product = Callable[[jax.Array, jax.Array], jax.Array]
OfRows = Callable[[jax.Array], jax.Array]
_CLIP, _SLOPE = 7.0, 1.702  # of gpt-oss


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """x / rms(x) · scale, computed in float32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * scale).astype(x.dtype)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in the precision of x."""
    return x @ w.astype(x.dtype)


def wide_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w with operands in the precision of x, and a result in float32."""
    # a product of one type with a result of another would be transposed with mixed types
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if x.dtype == jnp.bfloat16 else None
    return jnp.matmul(x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def mlp(
    params: Mapping[str, jax.Array], x: jax.Array, product: Product = matmul, of_rows: OfRows = lambda vector: vector
) -> jax.Array:
    """SwiGLU where there is a gate matrix, clipped or not, else GELU; with a token gate, times its sigmoid.

    Of a part of the hidden width its part of the result.

    `product(rows, matrix)` multiplies rows by their matrix, and `of_rows(vector)` is what a bias adds to each.
    """

    def linear(x: jax.Array, name: str) -> jax.Array:
        y, bias = product(x, params[name]), params.get(f"{name}_bias")
        if bias is None:
            return y
        return y + of_rows(share_of_sum(bias) if name == "down" else bias).astype(y.dtype)

    up = linear(x, "up")
    if "gate" in params:
        hidden = jax.nn.silu(linear(x, "gate")) * up
    elif "clipped_gate" in params:
        hidden = _clipped_swiglu(linear(x, "clipped_gate"), up)
    else:
        hidden = jax.nn.gelu(up)
    y = linear(hidden, "down")
    return y * jax.nn.sigmoid(matmul(x, params["token_gate"])) if "token_gate" in params else y


def _clipped_swiglu(gate: Float[Array, "*R F"], up: Float[Array, "*R F"]) -> Float[Array, "*R F"]:
    """The MLP's activation of gpt-oss (OpenAI 2025, model card, section 2.1): clipped, and with a residual of 1."""
    gate = jnp.minimum(gate, _CLIP)
    return gate * jax.nn.sigmoid(_SLOPE * gate) * (jnp.clip(up, -_CLIP, _CLIP) + 1)


def batched_mlp(params: Mapping[str, jax.Array], x_LRD: Float[Array, "L R D"]) -> Float[Array, "L R D"]:
    """Each of L MLPs on rows of its own."""
    return mlp(params, x_LRD, lambda x, w: jnp.einsum("lrd,ldf->lrf", x, w.astype(x.dtype)), lambda bias: bias[:, None])
