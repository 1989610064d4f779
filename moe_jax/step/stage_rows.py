"""The rows of stacked arrays that this pipeline stage has, by the blocks whose parameters they store.

R rows of a stacked array, some of them unused (see `moe_jax.config.layer_layout`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from moe_jax.config.layer_layout import Stages, segments
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.pipeline import stage

UNUSED = -1


def block_of_row(stages: Stages, number: int, place: int) -> NDArray[np.int32]:
    """Return the block in each row of the arrays of a segment, for a place in its period: an index, or UNUSED."""
    segment = segments(stages.model)[number]
    below = sum(len(other.kinds) * other.repeats for other in segments(stages.model)[:number])
    total, *rows = stages.layout[number]
    block_R = np.full(total, UNUSED, np.int32)
    for period, row in enumerate(rows):
        block_R[row] = below + period * len(segment.kinds) + place
    return block_R


def moe_of_row(stages: Stages, number: int, place: int) -> NDArray[np.int32]:
    """Return the same as an index among the blocks with experts."""
    moe_of_block = np.array([stages.model.block_kinds[:block].count("moe") for block in range(stages.model.num_blocks)])
    block_R = block_of_row(stages, number, place)
    return np.where(block_R == UNUSED, UNUSED, moe_of_block[block_R]).astype(np.int32)


def own_rows(x_R: NDArray[np.int32]) -> jax.Array:
    """Return the rows of this pipeline stage. Runs inside `shard_map`."""
    own = len(x_R) // jax.lax.axis_size(Axis.PIPELINE)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x_R), stage() * own, own)
