"""The precision of the experts' matrix products: `model.moe.expert_matmuls`.

`fp8` rounds operands to 8-bit floats (Micikevicius et al. 2022): rows and weights to e4m3, cotangents to e5m2.

    y = x·w, dx = dy·wᵀ    rounded operands
    dw = xᵀ·dy             the same rounded numbers, multiplied in the precision of the rows

Each row and each expert's matrix has a scale of its own, so the rounding of a row does not depend on other rows of its
device or microbatch. The sum over rows in dw cannot factor out a scale per row, so dw is not a product of 8-bit
numbers. Scales are powers of 2, so that only the cast to 8 bits rounds: a result may be scaled in bfloat16, and where a
row or matrix is sharded over tensor ranks, other scales change only numbers below 2⁻¹³ of its largest.

The numbers are cast back before a product, which is exact. XLA:GPU turns this into a product of 8-bit operands
(`GemmRewriter`: a cast, then a dot with one contracted dimension; on GPUs of compute capability 8.9 and above) if both
are in one computation. Dropless rows are multiplied in a loop after the cast, so it cannot.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import MoEConfig
from moe_jax.models.layers import MatrixProduct
from moe_jax.parallel.eight_bits import Quantized, quantize


def with_fp8_operands(product: MatrixProduct) -> MatrixProduct:
    """Return the product with rounded operands. Gradients pass straight through the rounding."""
    return product._replace(multiply=partial(_multiply, product._replace(groups=())))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(product: MatrixProduct, x: jax.Array, w: jax.Array, *groups: jax.Array) -> jax.Array:
    return _scaled(product, _row(x), _matrix(w, x), groups)


def _row(x: jax.Array) -> Quantized:
    return quantize(x, jnp.float8_e4m3fn, -1)


def _matrix(w: jax.Array, like: jax.Array) -> Quantized:
    return quantize(w.astype(like.dtype), jnp.float8_e4m3fn, (-2, -1))


def _scaled(product: MatrixProduct, x: Quantized, w: Quantized, groups: tuple[jax.Array, ...]) -> jax.Array:
    y = product.multiply(x.wide(), w.wide(), *groups)
    return y * x.scale * product.of_rows(w.scale[..., 0], *groups)


def _forward(product: MatrixProduct, x: jax.Array, w: jax.Array, *groups: jax.Array) -> tuple[jax.Array, Any]:
    row = _row(x)
    # saves w, which exists anyway, and not its 8-bit numbers, which would be stored for all blocks
    return _scaled(product, row, _matrix(w, x), groups), (row, w, groups)


def _backward(product: MatrixProduct, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    row, w, groups = saved
    d_row, matrix = quantize(dy, jnp.float8_e5m2, -1), _matrix(w, dy)
    dx = _scaled(product, d_row, Quantized(*(jnp.swapaxes(part, -2, -1) for part in matrix)), groups)
    dw = product.weight_gradient(row.wide() * row.scale, d_row.wide() * d_row.scale, *groups)
    return dx, dw.astype(w.dtype), *(None for _ in groups)


_multiply.defvjp(_forward, _backward)

_FORMS = {"compute_dtype": lambda product: product, "fp8": with_fp8_operands}


def expert_product(product: MatrixProduct, moe: MoEConfig) -> MatrixProduct:
    """Return the product in the precision that a config asks for."""
    return _FORMS[moe.expert_matmuls](product)
