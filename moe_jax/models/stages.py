"""Parameters in the layout of pipeline stages: blocks in the rows that `moe_jax.config.layer_layout` assigns."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from moe_jax.config.layer_layout import Stages
from moe_jax.models.parameters import param_shapes
from moe_jax.parallel.trees import Params


def stored_shapes(stages: Stages) -> Params:
    """Return the shapes of the parameters in the layout of stages; nothing is allocated."""
    return jax.eval_shape(lambda params: stored(params, stages), param_shapes(stages.model))


def stored(params: Params, stages: Stages) -> Params:
    """Return parameters in the layout of stages, from those in the order of blocks. Unused rows are 0."""

    def put(leaf: jax.Array, row: NDArray[np.int64], total: int) -> jax.Array:
        return jnp.zeros((total, *leaf.shape[1:]), leaf.dtype).at[row].set(leaf)

    return _rearrange(params, stages, put)


def in_order(params: Params, stages: Stages) -> Params:
    """Return parameters in the order of blocks, from those in the layout of stages."""
    return _rearrange(params, stages, lambda leaf, row, total: leaf[row])


def _rearrange(
    params: Params, stages: Stages, move: Callable[[jax.Array, NDArray[np.int64], int], jax.Array]
) -> Params:
    moved = {}
    for number, tree in params["segments"].items():
        total, *rows = stages.layout[number]
        row = np.array(rows)
        is_identity = np.array_equal(row, np.arange(total))
        moved[number] = (
            tree if is_identity else jax.tree.map(lambda leaf, row=row, total=total: move(leaf, row, total), tree)
        )
    return params | {"segments": moved}
