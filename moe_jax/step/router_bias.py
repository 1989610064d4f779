"""Load balancing without an auxiliary loss: each expert has a score bias that moves against its load.

Wang et al. 2024 (Auxiliary-Loss-Free Load Balancing), algorithm 1; DeepSeek-V3 2024, section 2.1.2. A bias only affects
which experts are chosen. It has no gradient, moment or weight decay. It is updated from the token counts of the whole
batch, which are the same on all devices.

M blocks with experts, E experts, R rows of a stacked array.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config.facts import SCORE_BIAS
from moe_jax.config.layer_layout import Stages, segments
from moe_jax.parallel.trees import Tree
from moe_jax.step.stage_rows import UNUSED, moe_of_row, own_rows


def score_biases(dims: Tree) -> Tree:
    """Return a tree of booleans that marks the score biases, with the structure of the parameters' dimensions."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key == SCORE_BIAS.name, dims, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


def with_moved_biases(params: Tree, count_ME: Int[Array, "M E"], stages: Stages, rate: float | None) -> Tree:
    """Return the parameters with updated biases, after a step with these counts of (token, choice) pairs per expert.

    Counts are over all devices. The bias of an expert with less than the mean load grows by `rate`, the bias of one
    with more falls by `rate`. Runs inside `shard_map`.
    """
    if not rate:
        return params
    moved = dict(params["segments"])
    for number, segment in enumerate(segments(stages.model)):
        for place, kind in enumerate(segment.kinds):
            if kind == "moe":
                own_R = own_rows(moe_of_row(stages, number, place))
                moved[number] = moved[number] | {place: _moved(moved[number][place], count_ME, own_R, rate)}
    return params | {"segments": moved}


def _moved(block: Tree, count_ME: jax.Array, moe_R: jax.Array, rate: float) -> Tree:
    up_RE = jnp.where(moe_R[:, None] == UNUSED, 0, direction(count_ME[moe_R]))
    bias_RE = block["moe"][SCORE_BIAS.name] + jnp.float32(rate) * up_RE
    return block | {"moe": block["moe"] | {SCORE_BIAS.name: bias_RE}}


def direction(count_RE: Int[Array, "R E"]) -> Float[Array, "R E"]:
    """Return the sign of mean load - load in integer arithmetic: it is exact for any number of pairs, so it is the same
    on every mesh.
    """
    mean_R1, rest_R1 = jnp.divmod(count_RE.sum(axis=-1, keepdims=True), count_RE.shape[-1])
    above_RE = mean_R1 - count_RE
    return jnp.sign(jnp.where(above_RE == 0, rest_R1, above_RE)).astype(jnp.float32)
