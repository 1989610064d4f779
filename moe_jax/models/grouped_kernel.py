"""The grouped product as a kernel for GPUs, in Pallas with its Triton backend. S rows, L groups, D and F widths.

One program for each tile of rows and each tile of the other width, so that nothing is launched per group: a loop of
XLA runs one product after another, and those of fine-grained experts are too small to fill a GPU. A program of a tile
that has no group ends at once. Widths are cut by the largest power of 2 that divides them, so nothing is masked.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from moe_jax.models.grouped_matmul import group_of_tiles

LEAST_WIDTH = 16  # of a block: what matrix units multiply
_MOST_WIDTH = 128  # of a block of the result
_SUMMED_BYTES = 128  # of a block's row along what is summed over: a line of the cache
_Ref = jax.Ref


class _Blocks(NamedTuple):
    """Of one program's product: its result is rows × columns, and it sums so many products at a time."""

    rows: int
    columns: int
    summed: int

    def parameters(self) -> triton.CompilerParams:
        return triton.CompilerParams(num_warps=8 if self.rows * self.columns >= _MOST_WIDTH**2 else 4, num_stages=3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def pallas(
    x_SD: Float[Array, "S D"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    interpret: bool = False,
) -> Float[Array, "S F"]:
    """Rows times their group's matrix; rows beyond the groups give 0.

    `interpret`: computed without a GPU, slowly. Raises ValueError for widths that are no multiples of 16.
    """
    return _rows(x_SD, w_LDF, size_L, tile, 1, interpret)


def _forward(x: jax.Array, w: jax.Array, size_L: jax.Array, tile: int, interpret: bool) -> tuple[jax.Array, tuple]:
    return pallas(x, w, size_L, tile, interpret), (x, w, size_L)


def _backward(tile: int, interpret: bool, saved: tuple, dy_SF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, size_L = saved
    dx_SD = _rows(dy_SF, w, size_L, tile, 2, interpret)
    return dx_SD, weight_gradient(x, dy_SF, size_L, tile, interpret), None


pallas.defvjp(_forward, _backward)


def _rows(x: jax.Array, w: jax.Array, size_L: jax.Array, tile: int, contracted: int, interpret: bool) -> jax.Array:
    """Rows times their matrix, summed over its dimension 1 or 2."""
    columns = w.shape[3 - contracted]
    blocks = _Blocks(min(tile, _MOST_WIDTH), _dividing(columns, _MOST_WIDTH), _summed(x))
    tiles = len(x) // blocks.rows
    product = pl.pallas_call(
        functools.partial(_rows_kernel, blocks=blocks, contracted=contracted),
        out_shape=jax.ShapeDtypeStruct((len(x), columns), x.dtype),
        grid=(columns // blocks.columns, tiles),  # neighbours share rows, which are read once
        compiler_params=blocks.parameters(),
        interpret=interpret,
        name="grouped_rows",
    )
    return product(group_of_tiles(size_L, tiles, blocks.rows).astype(jnp.int32), x, w)


def _rows_kernel(group_of: _Ref, x: _Ref, w: _Ref, y: _Ref, *, blocks: _Blocks, contracted: int) -> None:
    group = group_of[pl.program_id(1)]
    columns = pl.ds(pl.program_id(0) * blocks.columns, blocks.columns)
    rows = pl.ds(pl.program_id(1) * blocks.rows, blocks.rows)

    def turn(i: jax.Array, total: jax.Array) -> jax.Array:
        summed = pl.ds(i * blocks.summed, blocks.summed)
        matrix = w[group, summed, columns] if contracted == 1 else w[group, columns, summed]
        return total + _product(x[rows, summed], matrix, 1, contracted - 1)

    turns = (group < w.shape[0]).astype(jnp.int32) * (x.shape[1] // blocks.summed)
    total = jax.lax.fori_loop(0, turns, turn, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    y[rows, columns] = total.astype(y.dtype)


def weight_gradient(
    x: Float[Array, "S D"], dy: Float[Array, "S F"], size_L: Int[Array, " L"], tile: int, interpret: bool = False
) -> Float[Array, "L D F"]:
    """The gradient of each group's matrix, of its own rows; of an empty group 0."""
    groups, width, hidden = len(size_L), x.shape[1], dy.shape[1]
    rows = min(tile, _SUMMED_BYTES // x.dtype.itemsize)
    blocks = _Blocks(_dividing(width, _MOST_WIDTH), _dividing(hidden, _MOST_WIDTH), rows)
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

    def turn(i: jax.Array, total: jax.Array) -> jax.Array:
        rows = pl.ds(i * blocks.summed, blocks.summed)
        return total + _product(x[rows, width], dy[rows, hidden], 0, 0)

    nothing = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    dw[group, width, hidden] = jax.lax.fori_loop(bound_of[group], bound_of[group + 1], turn, nothing).astype(dw.dtype)


def _product(left: jax.Array, right: jax.Array, of_left: int, of_right: int) -> jax.Array:
    dims = (((of_left,), (of_right,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _summed(x: jax.Array) -> int:
    return _dividing(x.shape[1], _SUMMED_BYTES // x.dtype.itemsize)


def _dividing(width: int, most: int) -> int:
    """The largest power of 2 that divides a width, and is no more than `most`."""
    block = min(width & -width, most)
    if block < LEAST_WIDTH:
        raise ValueError(f"a width of {width} is no multiple of {LEAST_WIDTH}, which the kernel cuts it by")
    return block
