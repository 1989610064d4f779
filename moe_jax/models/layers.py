"""The small functions that every block uses.

D model width, F hidden width, R rows.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.parallel.tensor_axis import share_of_sum

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


class Product(NamedTuple):
    """How rows are multiplied by the matrices that they belong to, in the precision of the rows.

    The functions hold no arrays, and take `groups` behind their arguments.
    """

    multiply: Callable[..., jax.Array]  # rows, matrices → rows
    of_rows: Callable[..., jax.Array]  # a vector of each matrix → one of each row
    weight_gradient: Callable[..., jax.Array]  # rows, cotangents → a matrix of each group of rows
    groups: tuple[jax.Array, ...] = ()  # which rows belong to which matrix, if shapes do not tell


ONE = Product(matmul, lambda vector: vector, lambda x, dy: x.T @ dy)  # matrix for all rows


def mlp(params: Mapping[str, jax.Array], x: jax.Array, product: Product = ONE) -> jax.Array:
    """SwiGLU where there is a gate matrix, clipped or not, else GELU; with a token gate, times its sigmoid.

    Of a part of the hidden width its part of the result.
    """

    def linear(x: jax.Array, name: str) -> jax.Array:
        y, bias = product.multiply(x, params[name], *product.groups), params.get(f"{name}_bias")
        if bias is None:
            return y
        return y + product.of_rows(share_of_sum(bias) if name == "down" else bias, *product.groups).astype(y.dtype)

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


def _batched(x_LRD: jax.Array, w_LDF: jax.Array) -> jax.Array:
    return jnp.einsum("lrd,ldf->lrf", x_LRD, w_LDF.astype(x_LRD.dtype))


def _batched_gradient(x_LRD: jax.Array, dy_LRF: jax.Array) -> jax.Array:
    return jnp.einsum("lrd,lrf->ldf", x_LRD, dy_LRF)


EACH = Product(_batched, lambda vector_LF: vector_LF[:, None], _batched_gradient)  # of L matrices for its own R rows
