"""The grouped product as a kernel for Hopper GPUs, in Pallas with its Mosaic backend. S rows, L groups, D and F widths.

In bfloat16. A thread block computes one block of the result after another (a persistent kernel). One warpgroup of it
loads operands by asynchronous copies (TMA), some steps ahead; two others multiply, each its half of the block. Groups
are padded to whole tiles, so a block of rows has one matrix, nothing is masked, and results are written by asynchronous
copies, too. Blocks are computed in an order that reads the same rows and matrices at about the same time, so that they
come from the L2 cache. `profiling/gpu_tiles.py` times other blocks and orders. The kernels are in `hopper_kernels.py`,
which is imported where they are called: that takes a third of a second.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

WIDTH_MULTIPLE = 128  # of widths: blocks of the result are not masked


class Blocks(NamedTuple):
    """How a thread block of the kernel computes."""

    rows: int  # of a block of the result
    columns: int
    steps: int = 4  # operands in shared memory: of this many products
    splits_rows: bool = True  # each warpgroup computes half of the block's rows; otherwise half of its columns
    unfinished: int = 0  # products that may still run when the next one starts
    band: int = 8  # blocks side by side before the order moves on along the other dimension
    along: int = 0  # the dimension of a band: 0 rows, 1 columns

    @property
    def half(self) -> tuple[int, int]:
        """Return rows and columns of what one warpgroup computes."""
        return (self.rows // 2, self.columns) if self.splits_rows else (self.rows, self.columns // 2)


def hopper(
    x_SD: Float[Array, "S D"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    blocks: Blocks | None = None,
) -> Float[Array, "S F"]:
    """Multiply rows by the matrix of their group."""
    from moe_jax.models.hopper_kernels import multiply_rows

    return multiply_rows(x_SD, w_LDF, size_L, 1, blocks or _blocks(tile, w_LDF.shape[2]))


def hopper_dgrad(
    dy_SF: Float[Array, "S F"],
    w_LDF: Float[Array, "L D F"],
    size_L: Int[Array, " L"],
    tile: int,
    blocks: Blocks | None = None,
) -> Float[Array, "S D"]:
    """Return the gradient of the rows. The kernel reads the matrices transposed; they are not copied."""
    from moe_jax.models.hopper_kernels import multiply_rows

    return multiply_rows(dy_SF, w_LDF, size_L, 2, blocks or _blocks(tile, w_LDF.shape[1]))


def hopper_wgrad(
    x_SD: Float[Array, "S D"],
    dy_SF: Float[Array, "S F"],
    size_L: Int[Array, " L"],
    tile: int,
    blocks: Blocks | None = None,
) -> Float[Array, "L D F"]:
    """Return the gradient of the matrix of each group, from the rows of the group; 0 for an empty group."""
    from moe_jax.models.hopper_kernels import multiply_transposed

    return multiply_transposed(x_SD, dy_SF, size_L, blocks or _blocks(WIDTH_MULTIPLE, dy_SF.shape[1]))


def _blocks(tile: int, columns: int) -> Blocks:
    """Return the blocks for a number of rows in a tile, and of columns in the result."""
    rows = min(tile, WIDTH_MULTIPLE)
    wide = 2 * WIDTH_MULTIPLE
    return Blocks(rows, WIDTH_MULTIPLE if columns % wide else wide, splits_rows=rows == WIDTH_MULTIPLE)
