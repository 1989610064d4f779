"""Costs of gated delta nets: parameters, operations, memory traffic, and memory of a block that has one.

Of a model whose blocks have delta nets and attention, plans have the mean over its blocks: times and activations of
`attend` and `dense` are those of a block that has a share of each.
"""

import math
from typing import NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.config.attention_kernels import STATE_CHUNK

# Numbers in float32 per feature that pass through memory, forward and backward, which computes the forward pass again:
# estimates of how much XLA fuses.
_FEATURE_PASSES = (6, 18)
_PAIR_PASSES = (6, 18)  # per pair of tokens of a chunk
_STATE_PASSES = (4, 12)  # per state of a chunk
# float32 numbers in memory during the backward pass of a block, in the same units
_FEATURES_AT_WORK, _PAIRS_AT_WORK, _STATES_AT_WORK = 8, 6, 2


class DeltaWeights(NamedTuple):
    """Parameters of one delta net."""

    matrices: int  # of projections, sharded over tensor ranks by their heads
    of_heads: int  # numbers of each head, sharded like them
    whole: int  # of the convolution and the norm of the outputs, which every tensor rank has


def weights_of(model: ModelConfig) -> DeltaWeights:
    """Return the parameters of one delta net of a model."""
    delta, heads = model.delta_net, model.delta_net.num_value_heads or 0
    projected = 2 * delta.key_width + 3 * delta.value_width + 2 * heads
    channels = 2 * delta.key_width + delta.value_width
    return DeltaWeights(
        model.hidden_size * projected, 2 * heads, channels * delta.conv_kernel_dim + delta.value_head_dim
    )


def delta_share(model: ModelConfig) -> float:
    """Return the share of a model's blocks that have a delta net instead of attention."""
    return sum(view.is_delta for view in model.views) / model.num_blocks if model.has_delta_nets else 0.0


def mean_over_blocks(model: ModelConfig, of_attention: float, of_delta_net: float) -> float:
    """Return the mean of a quantity over a model's blocks, from that of a block of each kind."""
    share = delta_share(model)
    return (1 - share) * of_attention + share * of_delta_net if share else of_attention


def needed_flops(model: ModelConfig) -> int:
    """Return a token's operations by the definition of the rule: its key's value, the correction, and the output."""
    delta = model.delta_net
    return 6 * delta.value_width * delta.key_head_dim


def computed_flops(model: ModelConfig) -> float:
    """Return a token's operations in the matrix products of chunks, those that invert triangular matrices included."""
    delta, chunk = model.delta_net, STATE_CHUNK
    of_states = 6 * delta.value_width * delta.key_head_dim
    inverses = 4 * (math.log2(chunk) - 1) * chunk**2 * (delta.num_value_heads or 0)
    return of_states + 4 * chunk * (delta.value_width + delta.key_width) + inverses


def moved_bytes(model: ModelConfig, backward: bool) -> float:
    """Return a token's bytes that pass through memory between its projections, in float32."""
    units = zip(_per_token(model), (_FEATURE_PASSES, _PAIR_PASSES, _STATE_PASSES), strict=True)
    return 4.0 * sum(numbers * passes[backward] for numbers, passes in units)


def stored_numbers(model: ModelConfig) -> int:
    """Return a token's numbers that its delta net stores for the backward pass, in the compute dtype.

    They are features before the convolution, gates, rates and steps, and the outputs of all heads.
    """
    delta = model.delta_net
    return 2 * delta.key_width + 3 * delta.value_width + 2 * (delta.num_value_heads or 0)


def projected_numbers(model: ModelConfig) -> int:
    """Return those of them that are results of matrix products."""
    return stored_numbers(model) - model.delta_net.value_width


def working_bytes(model: ModelConfig) -> float:
    """Return a token's bytes during the backward pass of its delta net, which computes what is not stored again."""
    units = zip(_per_token(model), (_FEATURES_AT_WORK, _PAIRS_AT_WORK, _STATES_AT_WORK), strict=True)
    return 4.0 * sum(numbers * at_work for numbers, at_work in units)


def _per_token(model: ModelConfig) -> tuple[float, float, float]:
    """Return features, pairs of tokens in a chunk for all heads, and numbers of states, per token."""
    delta = model.delta_net
    return (
        2 * delta.key_width + delta.value_width,
        STATE_CHUNK * (delta.num_value_heads or 0),
        delta.value_width * delta.key_head_dim / STATE_CHUNK,
    )
