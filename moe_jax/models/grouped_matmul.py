"""Products of rows that are sorted by group with the matrix of their group. S rows, L groups, D and F widths.

Groups are padded with rows of 0 to whole tiles, so that a tile of rows has one matrix. `tile` is the number of rows of
a tile, and sizes of groups are multiples of it. Rows beyond the groups may hold anything, also NaN; products return 0
for them.

A product has three passes: forward, the gradient of the rows (dgrad), and the gradient of the weights (wgrad).
`moe_jax.models.grouped_products` puts passes together. Here are those that XLA compiles: `blocks` and `ragged`.

Loops run over the tiles that exist. Their number is not in the compiled program, so a scope gives the number of tiles
that fit; `measure.hlo` reads it.
"""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def blocks(
    x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S F"]:
    """Multiply one tile of rows after another, as many as there are.

    XLA's own grouped product multiplies every row by every group's matrix on CPU, and copies every row for every group
    on GPU.
    """
    return _tile_by_tile(x_SD, w_LDF, size_L, tile, 1)


def blocks_dgrad(
    dy_SF: Float[Array, "S F"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S D"]:
    """Return the gradient of the rows, one tile after another."""
    return _tile_by_tile(dy_SF, w_LDF, size_L, tile, 2)


def blocks_wgrad(
    x_SD: Float[Array, "S D"], dy_SF: Float[Array, "S F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "L D F"]:
    """Return the gradient of the matrix of each group: one group after another, summed over its tiles in float32."""
    shape = x_SD.shape[1], dy_SF.shape[1]
    tiles_of_group = -(-len(x_SD) // (tile * len(size_L)))  # on average

    def group(first: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(i: jax.Array, total_DF: jax.Array) -> jax.Array:
            rows, d_rows = (jax.lax.dynamic_slice_in_dim(each, first + i * tile, tile) for each in (x_SD, dy_SF))
            return total_DF + jax.lax.dot_general(
                rows, d_rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

        with _at_most(tiles_of_group):
            total_DF = jax.lax.fori_loop(0, size // tile, body, jnp.zeros(shape, jnp.float32))
        return first + size, total_DF.astype(x_SD.dtype)

    return jax.lax.scan(group, jnp.int32(0), size_L)[1]


def ragged(
    x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S F"]:
    """Multiply with XLA's own grouped product, which is a kernel on TPU.

    There is no such weight gradient: XLA:TPU has no kernel for it and would multiply every row by every group's mask.
    """
    return jax.lax.ragged_dot(x_SD, w_LDF, size_L)


def ragged_dgrad(
    dy_SF: Float[Array, "S F"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S D"]:
    """Return the gradient of the rows with XLA's own grouped product."""
    return jax.lax.ragged_dot(dy_SF, jnp.swapaxes(w_LDF, 1, 2), size_L)


def group_of_tiles(size_L: Int[Array, " L"], tiles: int, tile: int) -> Int[Array, " tiles"]:
    """Return the group of each of `tiles` tiles, and L for tiles beyond the groups."""
    return jnp.searchsorted(jnp.cumsum(size_L), jnp.arange(tiles) * tile, side="right", method="compare_all")


def mask_beyond(y_SF: Float[Array, "S F"], size_L: Int[Array, " L"]) -> Float[Array, "S F"]:
    """Return the rows with 0 beyond the groups, for kernels that leave those unwritten."""
    return jnp.where((jnp.arange(len(y_SF)) < size_L.sum())[:, None], y_SF, 0)


def _tile_by_tile(x: jax.Array, w: jax.Array, size_L: jax.Array, tile: int, contracted: int) -> jax.Array:
    """Multiply rows by the matrix of their group, summed over dimension 1 or 2 of the matrix."""
    end_L = jnp.cumsum(size_L)
    group_of = group_of_tiles(size_L, len(x) // tile, tile)

    def body(i: jax.Array, y: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, i * tile, tile)
        matrix = jax.lax.dynamic_index_in_dim(w, group_of[i], keepdims=False)
        out = jax.lax.dot_general(rows, matrix, (((1,), (contracted - 1,)), ((), ())))
        return jax.lax.dynamic_update_slice_in_dim(y, out, i * tile, axis=0)

    zeros = jnp.zeros((len(x), w.shape[3 - contracted]), x.dtype)
    with _at_most(len(x) // tile):
        return jax.lax.fori_loop(0, end_L[-1] // tile, body, zeros)


def _at_most(iterations: int) -> AbstractContextManager[None]:
    """Open a scope with the trip count that a loop in it has if all rows exist."""
    return jax.named_scope(f"at_most_{iterations}")
