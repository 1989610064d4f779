"""The grouped product as a kernel for GPUs, in Pallas with its Triton backend. S rows, L groups, D and F widths.

There is one program for each tile of rows and each tile of the other width, so nothing is launched per group: a loop of
XLA runs one product after another, and those of fine-grained experts are too small to fill a GPU. The program of a tile
without a group ends at once. Widths are split by the largest power of 2 that divides them, so nothing is masked.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from moe_jax.models.grouped_matmul import group_of_tiles

MIN_WIDTH = 16  # of a block: the width that matrix units multiply
_MAX_WIDTH = 128  # of a block of the result
_SUMMED_BYTES = 128  # of a block's row along the summed dimension: one cache line
_Ref = jax.Ref


class _Blocks(NamedTuple):
    """The blocks of one program's product.

    The result is `rows` × `columns`, and each iteration sums `summed` products.
    """

    rows: int
    columns: int
    summed: int

    def parameters(self) -> triton.CompilerParams:
        return triton.CompilerParams(num_warps=8 if self.rows * self.columns >= _MAX_WIDTH**2 else 4, num_stages=3)


def pallas(
    x_SD: Float[Array, "S D"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    interpret: bool = False,
) -> Float[Array, "S F"]:
    """Multiply rows by the matrix of their group.

    `interpret`: run without a GPU, slowly. Raises ValueError for widths that are not multiples of 16.
    """
    return _rows(x_SD, w_LDF, size_L, tile, 1, interpret)


def pallas_dgrad(
    dy_SF: Float[Array, "S F"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    interpret: bool = False,
) -> Float[Array, "S D"]:
    """Return the gradient of the rows."""
    return _rows(dy_SF, w_LDF, size_L, tile, 2, interpret)


def _rows(x: jax.Array, w: jax.Array, size_L: jax.Array, tile: int, contracted: int, interpret: bool) -> jax.Array:
    """Multiply rows by the matrix of their group, summed over dimension 1 or 2 of the matrix."""
    columns = w.shape[3 - contracted]
    blocks = _Blocks(min(tile, _MAX_WIDTH), _block_width(columns, _MAX_WIDTH), _summed_width(x))
    tiles = len(x) // blocks.rows
    product = pl.pallas_call(
        functools.partial(_rows_kernel, blocks=blocks, contracted=contracted),
        out_shape=jax.ShapeDtypeStruct((len(x), columns), x.dtype),
        grid=(columns // blocks.columns, tiles),  # neighbouring programs share rows, which are read once
        compiler_params=blocks.parameters(),
        interpret=interpret,
        name="grouped_rows",
    )
    return product(group_of_tiles(size_L, tiles, blocks.rows).astype(jnp.int32), x, w)


def _rows_kernel(group_of: _Ref, x: _Ref, w: _Ref, y: _Ref, *, blocks: _Blocks, contracted: int) -> None:
    group = group_of[pl.program_id(1)]
    columns = pl.ds(pl.program_id(0) * blocks.columns, blocks.columns)
    rows = pl.ds(pl.program_id(1) * blocks.rows, blocks.rows)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        summed = pl.ds(i * blocks.summed, blocks.summed)
        matrix = w[group, summed, columns] if contracted == 1 else w[group, columns, summed]
        return total + _product(x[rows, summed], matrix, 1, contracted - 1)

    iterations = (group < w.shape[0]).astype(jnp.int32) * (x.shape[1] // blocks.summed)
    total = jax.lax.fori_loop(0, iterations, body, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    y[rows, columns] = total.astype(y.dtype)


def pallas_wgrad(
    x: Float[Array, "S D"], dy: Float[Array, "S F"], size_L: Int[Array, " L"], tile: int, interpret: bool = False
) -> Float[Array, "L D F"]:
    """Return the gradient of the matrix of each group, from the rows of the group; 0 for an empty group."""
    groups, width, hidden = len(size_L), x.shape[1], dy.shape[1]
    rows = min(tile, _SUMMED_BYTES // x.dtype.itemsize)
    blocks = _Blocks(_block_width(width, _MAX_WIDTH), _block_width(hidden, _MAX_WIDTH), rows)
    product = pl.pallas_call(
        functools.partial(_weights_kernel, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct((groups, width, hidden), x.dtype),
        grid=(hidden // blocks.columns, width // blocks.rows, groups),
        compiler_params=blocks.parameters(),
        interpret=interpret,
        name="grouped_weights",
    )
    bound_L1 = jnp.cumsum(jnp.pad(size_L, (1, 0))) // rows
    return product(bound_L1.astype(jnp.int32), x, dy)


def _weights_kernel(bound_of: _Ref, x: _Ref, dy: _Ref, dw: _Ref, *, blocks: _Blocks) -> None:
    group = pl.program_id(2)
    width = pl.ds(pl.program_id(1) * blocks.rows, blocks.rows)
    hidden = pl.ds(pl.program_id(0) * blocks.columns, blocks.columns)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        rows = pl.ds(i * blocks.summed, blocks.summed)
        return total + _product(x[rows, width], dy[rows, hidden], 0, 0)

    zeros = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    dw[group, width, hidden] = jax.lax.fori_loop(bound_of[group], bound_of[group + 1], body, zeros).astype(dw.dtype)


def _product(left: jax.Array, right: jax.Array, left_dim: int, right_dim: int) -> jax.Array:
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _summed_width(x: jax.Array) -> int:
    return _block_width(x.shape[1], _SUMMED_BYTES // x.dtype.itemsize)


def _block_width(width: int, max_width: int) -> int:
    """Return the largest power of 2 that divides `width` and is at most `max_width`.

    Raises ValueError if it is below `MIN_WIDTH`.
    """
    block = min(width & -width, max_width)
    if block < MIN_WIDTH:
        raise ValueError(f"a width of {width} is no multiple of {MIN_WIDTH}, which the kernel cuts it by")
    return block
