"""The grouped product by the kernel that jax ships for Blackwell GPUs, in Pallas with its Mosaic backend.

S rows, L groups, D and F widths, in bfloat16. The kernel takes groups of any size, so `tile` is not used. Its modules
load test utilities of jax, so they are imported where it is called.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.grouped_matmul import mask_beyond

PAIR_MULTIPLE = 256  # of rows and widths of a pair of thread blocks, whose results are not masked


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
