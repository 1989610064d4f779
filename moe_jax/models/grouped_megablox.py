"""Grouped products by the kernels for TPUs that jax ships (MegaBlox; Gale et al. 2022), in Pallas.

S rows, L groups, D and F widths. Products are summed in float32. The kernels are imported where they are called, since
only TPUs use them and they load all of Pallas for TPUs.
"""

import jax
from jaxtyping import Array, Float, Int

from moe_jax.models.grouped_matmul import mask_beyond

_MAX_WIDTH = 512  # of a block of the result and of what is summed: operands and sums of a block fit into vector memory


def megablox(
    x_SD: Float[Array, "S D"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    interpret: bool = False,
) -> Float[Array, "S F"]:
    """Multiply rows by the matrix of their group. `interpret`: run without a TPU, slowly."""
    return _rows(x_SD, w_LDF, size_L, tile, False, interpret)


def megablox_dgrad(
    dy_SF: Float[Array, "S F"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    interpret: bool = False,
) -> Float[Array, "S D"]:
    """Return the gradient of the rows. The kernel reads the matrices transposed; they are not copied."""
    return _rows(dy_SF, w_LDF, size_L, tile, True, interpret)


def megablox_wgrad(
    x_SD: Float[Array, "S D"],
    dy_SF: Float[Array, "S F"],
    size_L: Int[Array, " L"],
    tile: int,
    interpret: bool = False,
) -> Float[Array, "L D F"]:
    """Return the gradient of the matrix of each group; 0 for an empty group."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = _tiling(tile, x_SD.shape[1], dy_SF.shape[1])
    return tgmm(x_SD.T, dy_SF, size_L, preferred_element_type=x_SD.dtype, tiling=tiling, interpret=interpret)


def _rows(
    x: jax.Array, w: jax.Array, size_L: jax.Array, tile: int, transposed: bool, interpret: bool
) -> Float[Array, "S _"]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    y = gmm(
        x,
        w,
        size_L,
        preferred_element_type=x.dtype,
        tiling=_tiling(tile, x.shape[1], w.shape[1] if transposed else w.shape[2]),
        transpose_rhs=transposed,
        interpret=interpret,
    )
    return mask_beyond(y, size_L)


def _tiling(tile: int, *widths: int) -> tuple[int, int, int]:
    first, second = (min(width, _MAX_WIDTH) for width in widths)
    return tile, first, second
