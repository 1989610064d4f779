"""In which precision experts multiply: `model.moe.expert_matmuls`.

`fp8` rounds operands to 8-bit floats (Micikevicius et al. 2022): rows and weights to e4m3, cotangents to e5m2.

    y = x·w, dx = dy·wᵀ    rounded operands
    dw = xᵀ·dy             the same rounded numbers, multiplied in the precision of the rows

A row has a scale of its own and so has an expert's matrix: what a row becomes depends on nothing that it shares a
device or a microbatch with. A sum over rows cannot have the scale of each in front of it, so dw is no product of 8-bit
numbers. Scales are powers of 2, so that nothing but the cast to 8 bits rounds: a result may be scaled in bfloat16, and
where tensor ranks cut a row or a matrix, other scales change only numbers below 2⁻¹³ of its largest.

The numbers are cast back in front of a product, which is exact. XLA:GPU makes a product of 8-bit operands of that
(`GemmRewriter`: a cast, then a dot with one contracted dimension; on GPUs of compute capability 8.9 and above), where
both are in one computation: dropless rows are multiplied in a loop, behind the cast.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.models.layers import Product

_LARGEST = {jnp.float8_e4m3fn: 2.0**8, jnp.float8_e5m2: 2.0**15}  # powers of 2, of which 1.5 times is in range, too
_SMALLEST_SCALE = 2.0**-100  # of rows of 0


class Rounded(NamedTuple):
    """8-bit numbers, and what to multiply them by in the type that they had."""

    numbers: Array
    scale: Array

    def wide(self) -> Array:
        """In that type, without their scale."""
        return self.numbers.astype(self.scale.dtype)


def rounded(x: Float[Array, "..."], to: Any, axes: int | tuple[int, ...]) -> Rounded:
    """x to 3 bits of mantissa (e4m3) or 2 (e5m2), with one scale along `axes`; all NaN if a number is not finite."""
    wide = x.astype(jnp.float32)
    nearest = jax.lax.reduce_precision(jnp.max(jnp.abs(wide), axes, keepdims=True), exponent_bits=8, mantissa_bits=0)
    scale = jnp.maximum(nearest / _LARGEST[to], _SMALLEST_SCALE)
    # with a barrier: XLA takes a cast and the next for one where it may keep more precision (simplify-fp-conversions)
    numbers = jax.lax.optimization_barrier((wide / scale).astype(to))
    return Rounded(numbers, scale.astype(x.dtype))


def in_fp8(product: Product) -> Product:
    """The same product of rounded operands; gradients go straight through the rounding."""
    return product._replace(multiply=partial(_multiply, product._replace(groups=())))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(product: Product, x: jax.Array, w: jax.Array, *groups: jax.Array) -> jax.Array:
    return _scaled(product, _row(x), _matrix(w, x), groups)


def _row(x: jax.Array) -> Rounded:
    return rounded(x, jnp.float8_e4m3fn, -1)


def _matrix(w: jax.Array, like: jax.Array) -> Rounded:
    return rounded(w.astype(like.dtype), jnp.float8_e4m3fn, (-2, -1))


def _scaled(product: Product, x: Rounded, w: Rounded, groups: tuple[jax.Array, ...]) -> jax.Array:
    y = product.multiply(x.wide(), w.wide(), *groups)
    return y * x.scale * product.of_rows(w.scale[..., 0], *groups)


def _forward(product: Product, x: jax.Array, w: jax.Array, *groups: jax.Array) -> tuple[jax.Array, Any]:
    row = _row(x)
    # w itself, which there is anyway, and not its numbers, which would be kept for all blocks
    return _scaled(product, row, _matrix(w, x), groups), (row, w, groups)


def _backward(product: Product, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    row, w, groups = saved
    d_row, matrix = rounded(dy, jnp.float8_e5m2, -1), _matrix(w, dy)
    dx = _scaled(product, d_row, Rounded(*(jnp.swapaxes(part, -2, -1) for part in matrix)), groups)
    dw = product.weight_gradient(row.wide() * row.scale, d_row.wide() * d_row.scale, *groups)
    return dx, dw.astype(w.dtype), *(None for _ in groups)


_multiply.defvjp(_forward, _backward)

_FORMS = {"compute_dtype": lambda product: product, "fp8": in_fp8}


def as_experts_multiply(product: Product, moe: MoEConfig) -> Product:
    """The product in the precision that a config asks for."""
    return _FORMS[moe.expert_matmuls](product)
