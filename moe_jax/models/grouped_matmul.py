"""Rows sorted by group, each group times its own matrix. S rows, L groups, D and F widths.

Rows beyond the groups give 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 64  # rows that share a matrix on the CPU: fewer waste memory on copies of it, more waste rows


def ragged(x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"]) -> Float[Array, "S F"]:
    """XLA's own grouped product."""
    return jax.lax.ragged_dot(x_SD, w_LDF, size_L)


def blocks(x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"]) -> Float[Array, "S F"]:
    """Groups padded to whole blocks of rows, each block times a copy of its group's matrix.

    XLA's grouped product on CPU multiplies every row by every group's matrix.
    """
    rows, groups = x_SD.shape[0], size_L.shape[0]
    num_blocks = -(-rows // _BLOCK) + groups
    padded_L = -(-size_L // _BLOCK) * _BLOCK
    shift_L = jnp.cumsum(padded_L) - padded_L - (jnp.cumsum(size_L) - size_L)
    row_S = jnp.arange(rows)
    group_S = jnp.searchsorted(jnp.cumsum(size_L), row_S, side="right")
    place_S = jnp.where(group_S < groups, row_S + shift_L[jnp.minimum(group_S, groups - 1)], num_blocks * _BLOCK)
    x_pad = jnp.zeros((num_blocks * _BLOCK, x_SD.shape[1]), x_SD.dtype).at[place_S].set(x_SD, mode="drop")
    first_row = jnp.arange(num_blocks) * _BLOCK
    group_of_block = jnp.searchsorted(jnp.cumsum(padded_L), first_row, side="right")
    # float32 copies: a matrix's gradient is the sum over its blocks
    w_blocks = jnp.take(w_LDF.astype(jnp.float32), jnp.minimum(group_of_block, groups - 1), axis=0).astype(x_SD.dtype)
    y_pad = jnp.einsum("nbd,ndf->nbf", x_pad.reshape(num_blocks, _BLOCK, -1), w_blocks)
    return jnp.take(y_pad.reshape(num_blocks * _BLOCK, -1), place_S, axis=0, mode="fill", fill_value=0)


GROUPED_PRODUCTS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "cpu": blocks,
    "gpu": ragged,
    "tpu": ragged,
}
