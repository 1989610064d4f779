"""Small functions that every block uses. D model width, F hidden width, R rows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig

_CLIP, _SLOPE = 7.0, 1.702  # the constants of gpt-oss


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Return x / rms(x) · scale, computed in float32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * scale).astype(x.dtype)


def norm_weight(weight: Float[Array, "*D"], model: ModelConfig) -> Float[Array, "*D"]:
    """Return what an RMSNorm of a model multiplies by, from its weights, which may be differences from 1."""
    return 1 + weight if model.rms_norm_zero_centered else weight


def norm(x: Float[Array, "... D"], weight: Float[Array, " D"], model: ModelConfig) -> Float[Array, "... D"]:
    """Apply an RMSNorm of a model."""
    return rms_norm(x, norm_weight(weight, model), model.rms_norm_eps)


def block_norm(params: Mapping[str, Any], x: Float[Array, "... D"], model: ModelConfig) -> Float[Array, "... D"]:
    """Apply the norm before attention, an MLP or experts, or the last one: an RMSNorm, or with a bias a LayerNorm."""
    if "norm_bias" not in params:
        return norm(x, params["norm"], model)
    return layer_norm(x, params["norm"], params["norm_bias"], model.rms_norm_eps)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """Return (x − mean) / deviation · scale + bias, computed in float32 (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse_deviation = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    return (centered * inverse_deviation * scale + bias).astype(x.dtype)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return x · factor in the precision of x; a factor of 1 costs nothing."""
    return x if factor == 1 else x * factor


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x @ w in the precision of x."""
    return x @ w.astype(x.dtype)


def wide_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x @ w with operands in the precision of x, and the result in float32."""
    # with `preferred_element_type` alone, the transpose of the product would have operands of mixed types
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if x.dtype == jnp.bfloat16 else None
    return jnp.matmul(x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def wide_product(product: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Return `product(*operands)`, which is not differentiated, and has a float32 result or intermediate result.

    XLA:CPU cannot compile or run some products of bfloat16 with such results, e.g. of a single row. There the operands
    are converted, which gives the same products.
    """
    if all(each.dtype != jnp.bfloat16 for each in operands):
        return product(*operands)
    dtype = jax.eval_shape(product, *operands).dtype

    def of_floats(*operands: jax.Array) -> jax.Array:
        return product(*(each.astype(jnp.float32) for each in operands)).astype(dtype)

    return jax.lax.platform_dependent(*operands, cpu=of_floats, default=product)


class MatrixProduct(NamedTuple):
    """How rows are multiplied by the matrices that they belong to, in the precision of the rows.

    The functions capture no arrays, and take `groups` after their other arguments.
    """

    multiply: Callable[..., jax.Array]  # rows, matrices → rows
    of_rows: Callable[..., jax.Array]  # a vector per matrix → a vector per row
    weight_gradient: Callable[..., jax.Array]  # rows, cotangents → a matrix per group of rows
    groups: tuple[jax.Array, ...] = ()  # which rows belong to which matrix, where shapes do not determine it


ONE = MatrixProduct(matmul, lambda vector: vector, lambda x, dy: x.T @ dy)  # one matrix for all rows


def mlp(params: Mapping[str, jax.Array], x: jax.Array, product: MatrixProduct = ONE) -> jax.Array:
    """Apply SwiGLU if there is a gate matrix (clipped for `clipped_gate`), otherwise GELU, or with `squared_up` instead
    of `up` max(x, 0)² (So et al. 2021, "Primer").

    With a token gate the result is multiplied by its sigmoid. Given a shard of the hidden width, the result is that
    shard's part of the sum.
    """

    def linear(x: jax.Array, name: str) -> jax.Array:
        y, bias = product.multiply(x, params[name], *product.groups), params.get(f"{name}_bias")
        if bias is None:
            return y
        return y + product.of_rows(bias, *product.groups).astype(y.dtype)

    up = linear(x, "squared_up" if "squared_up" in params else "up")
    if "gate" in params:
        hidden = jax.nn.silu(linear(x, "gate")) * up
    elif "clipped_gate" in params:
        hidden = _clipped_swiglu(linear(x, "clipped_gate"), up)
    elif "squared_up" in params:
        hidden = jnp.square(jax.nn.relu(up))
    else:
        hidden = jax.nn.gelu(up)
    y = linear(hidden, "down")
    return y * jax.nn.sigmoid(matmul(x, params["token_gate"])) if "token_gate" in params else y


def _clipped_swiglu(gate: Float[Array, "*R F"], up: Float[Array, "*R F"]) -> Float[Array, "*R F"]:
    """Apply the activation of the MLP of gpt-oss (OpenAI 2025, model card, section 2.1).

    It is a SwiGLU that is clipped and has a residual of 1.
    """
    gate = jnp.minimum(gate, _CLIP)
    return gate * jax.nn.sigmoid(_SLOPE * gate) * (jnp.clip(up, -_CLIP, _CLIP) + 1)


def _batched(x_LRD: jax.Array, w_LDF: jax.Array) -> jax.Array:
    return jnp.einsum("lrd,ldf->lrf", x_LRD, w_LDF.astype(x_LRD.dtype))


def _batched_gradient(x_LRD: jax.Array, dy_LRF: jax.Array) -> jax.Array:
    return jnp.einsum("lrd,lrf->ldf", x_LRD, dy_LRF)


# each of L matrices for its own R rows
EACH = MatrixProduct(_batched, lambda vector_LF: vector_LF[:, None], _batched_gradient)
