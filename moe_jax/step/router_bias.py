"""Balance without an auxiliary loss: biases of experts' scores that move against their loads.

Wang et al. 2024 (Auxiliary-Loss-Free Load Balancing), algorithm 1; DeepSeek-V3 2024, section 2.1.2. A bias counts in
the choice of experts alone. No gradient, moment or decay reaches it: what moves it are the counts of the whole batch,
the same on all devices.

M blocks with experts, E experts, R rows of a stacked array, some of them unused (see `moe_jax.config.layer_layout`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from moe_jax.config.facts import SCORE_BIAS
from moe_jax.config.layer_layout import Stages, segments
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.pipeline import stage
from moe_jax.parallel.trees import Tree

_UNUSED = -1


def score_biases(dims: Tree) -> Tree:
    """Which leaves of a tree like the parameters' dimensions are biases of experts' scores."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key == SCORE_BIAS.name, dims, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


def with_moved_biases(params: Tree, count_ME: Int[Array, "M E"], stages: Stages, rate: float | None) -> Tree:
    """Parameters with biases after a step in which so many (token, choice) pairs of all devices chose each expert.

    Those of experts with less than the mean load grow by `rate`, those with more fall. Runs inside `shard_map`.
    """
    if not rate:
        return params
    moved = dict(params["segments"])
    for number, segment in enumerate(segments(stages.model)):
        for place, kind in enumerate(segment.kinds):
            if kind == "moe":
                own_R = _own_rows(_moe_of_row(stages, number, place))
                moved[number] = moved[number] | {place: _moved(moved[number][place], count_ME, own_R, rate)}
    return params | {"segments": moved}


def _moved(block: Tree, count_ME: jax.Array, moe_R: jax.Array, rate: float) -> Tree:
    up_RE = jnp.where(moe_R[:, None] == _UNUSED, 0, direction(count_ME[moe_R]))
    bias_RE = block["moe"][SCORE_BIAS.name] + jnp.float32(rate) * up_RE
    return block | {"moe": block["moe"] | {SCORE_BIAS.name: bias_RE}}


def direction(count_RE: Int[Array, "R E"]) -> Float[Array, "R E"]:
    """The sign of mean load - load, in whole numbers: exact for however many pairs, so the same on every mesh."""
    mean_R1, rest_R1 = jnp.divmod(count_RE.sum(axis=-1, keepdims=True), count_RE.shape[-1])
    above_RE = mean_R1 - count_RE
    return jnp.sign(jnp.where(above_RE == 0, rest_R1, above_RE)).astype(jnp.float32)


def _moe_of_row(stages: Stages, number: int, place: int) -> NDArray[np.int32]:
    """Which of the blocks with experts lies in each row of a segment's stacked arrays."""
    kinds, segment = stages.model.block_kinds, segments(stages.model)[number]
    below = sum(len(other.kinds) * other.repeats for other in segments(stages.model)[:number])
    total, *rows = stages.layout[number]
    moe_R = np.full(total, _UNUSED, np.int32)
    for period, row in enumerate(rows):
        moe_R[row] = kinds[: below + period * len(segment.kinds) + place].count("moe")
    return moe_R


def _own_rows(x_R: NDArray[np.int32]) -> jax.Array:
    """Those of this pipeline stage."""
    own = len(x_R) // jax.lax.axis_size(Axis.PIPELINE)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x_R), stage() * own, own)
