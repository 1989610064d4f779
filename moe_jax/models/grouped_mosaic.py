"""Grouped products by kernels that jax ships for Hopper and Blackwell GPUs, in Pallas with its Mosaic backend.

S rows, L groups, D and F widths, in bfloat16. The kernels take groups of any size, so `tile` is not used. A thread
block of a Hopper kernel computes one block of the result; asynchronous copies (TMA) load its operands to shared memory
some steps ahead, and the numbers below fit 4 such steps into its 227 KiB. The kernels' modules load test utilities of
jax, so they are imported where they are called.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.grouped_matmul import mask_beyond

WIDTH_MULTIPLE = 128  # of widths: blocks of the kernels are not masked
PAIR_MULTIPLE = 2 * WIDTH_MULTIPLE  # of rows and widths of a pair of thread blocks
_HOPPER: dict[str, Any] = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 1,
}


def hopper(
    x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S F"]:
    """Multiply rows by the matrix of their group."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return mask_beyond(ragged_dot(x_SD, w_LDF, group_sizes=size_L, **_HOPPER), size_L)


def hopper_dgrad(
    dy_SF: Float[Array, "S F"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S D"]:
    """Return the gradient of the rows. The kernel reads the matrices transposed; they are not copied."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return mask_beyond(ragged_dot(dy_SF, w_LDF, group_sizes=size_L, transpose_rhs=True, **_HOPPER), size_L)


def hopper_wgrad(
    x_SD: Float[Array, "S D"], dy_SF: Float[Array, "S F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "L D F"]:
    """Return the gradient of the matrix of each group; 0 for an empty group."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    return transposed_ragged_dot(x_SD, dy_SF, group_sizes=size_L, **_HOPPER)


def blackwell(
    x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S F"]:
    """Multiply rows by the matrix of their group. There is no kernel for the gradients.

    Pairs of thread blocks share operands (`collective`), so rows are padded to whole blocks of a pair.
    """
    from jax.experimental.pallas.ops.gpu.blackwell_matmul_mgpu import MatmulDimension
    from jax.experimental.pallas.ops.gpu.blackwell_ragged_dot_mgpu import TuningConfig, ragged_dot_kernel

    tuning = TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        collective=True,
        grid_tile_width=1,
        grid_minor_dim=MatmulDimension.N,
    )
    missing = -len(x_SD) % PAIR_MULTIPLE
    y_SF = ragged_dot_kernel(jnp.pad(x_SD, ((0, missing), (0, 0))), w_LDF, size_L, tuning)[: len(x_SD)]
    return mask_beyond(y_SF, size_L)
