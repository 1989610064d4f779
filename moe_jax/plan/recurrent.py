"""Costs of recurrent layers (gated delta nets, Mamba-2): parameters, operations, memory traffic, and memory of a block
that has one.

Of a model whose blocks have recurrent layers and attention, plans have the mean over its blocks: times and activations
of `attend` and `dense` are those of a block that has a share of each.
"""

import functools
import math
from dataclasses import dataclass

from moe_jax.config import ModelConfig
from moe_jax.config.attention_kernels import STATE_CHUNK

# Numbers in float32 per feature that pass through memory, forward and backward, which computes the forward pass again:
# estimates of how much XLA fuses.
_FEATURE_PASSES = (6, 18)
_PAIR_PASSES = (6, 18)  # per pair of tokens of a chunk
_STATE_PASSES = (4, 12)  # per state of a chunk
# float32 numbers in memory during the backward pass of a block, in the same units
_FEATURES_AT_WORK, _PAIRS_AT_WORK, _STATES_AT_WORK = 8, 6, 2


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer:
    """What determines the costs of one recurrent layer. Operations and numbers are those of a token."""

    head_matrices: int  # parameters of projections, sharded over tensor ranks by their heads
    whole_matrices: int = 0  # of projections that every tensor rank has
    head_vectors: int  # parameters of heads outside of products
    whole_vectors: int  # those that every tensor rank has
    heads: int
    values: int  # features of all heads' values
    keys: int  # numbers of a head's key
    convolved: int  # features that are convolved
    projected: int  # results of the products with the token
    shared: int = 0  # those of them that every tensor rank computes
    needed_flops: int  # of the recurrence by its definition
    computed_flops: float  # in the matrix products of chunks

    def projected_numbers(self, tensor: int = 1) -> float:
        """Return a device's results of products with a token, which are stored for the backward pass."""
        return (self.projected - self.shared) / tensor + self.shared

    def stored_numbers(self, tensor: int = 1) -> float:
        """Return all numbers that a device stores of a token, in the compute dtype: those, and the outputs of heads."""
        return self.projected_numbers(tensor) + self.values / tensor

    def moved_bytes(self, backward: bool) -> float:
        """Return a token's bytes that pass through memory between its projections, in float32."""
        passes = (each[backward] for each in (_FEATURE_PASSES, _PAIR_PASSES, _STATE_PASSES))
        return 4.0 * sum(numbers * each for numbers, each in zip(self._per_token, passes, strict=True))

    def working_bytes(self) -> float:
        """Return a token's bytes during the backward pass, which computes what is not stored again."""
        at_work = (_FEATURES_AT_WORK, _PAIRS_AT_WORK, _STATES_AT_WORK)
        return 4.0 * sum(numbers * each for numbers, each in zip(self._per_token, at_work, strict=True))

    @property
    def _per_token(self) -> tuple[float, float, float]:
        """Features, pairs of tokens in a chunk for all heads, and numbers of states."""
        return self.convolved, STATE_CHUNK * self.heads, self.values * self.keys / STATE_CHUNK


@functools.lru_cache(maxsize=64)
def recurrent_layer(model: ModelConfig) -> RecurrentLayer:
    """Return the recurrent layer of a model's blocks that have one."""
    return _mamba(model) if model.has_mamba else _delta_net(model)


def recurrent_share(model: ModelConfig) -> float:
    """Return the share of a model's blocks that have a recurrent layer instead of attention."""
    if not (model.has_delta_nets or model.has_mamba):
        return 0.0
    return sum(view.is_recurrent for view in model.views) / model.num_blocks


def mean_over_blocks(model: ModelConfig, of_attention: float, of_recurrent: float) -> float:
    """Return the mean of a quantity over a model's blocks, from that of a block of each kind."""
    share = recurrent_share(model)
    return (1 - share) * of_attention + share * of_recurrent if share else of_attention


def _delta_net(model: ModelConfig) -> RecurrentLayer:
    delta, heads, chunk = model.delta_net, model.delta_net.num_value_heads or 0, STATE_CHUNK
    features = 2 * delta.key_width + delta.value_width
    projected = features + delta.value_width + 2 * heads  # with gates, rates and steps
    inverses = 4 * (math.log2(chunk) - 1) * chunk**2 * heads  # of triangular matrices
    of_states = 6 * delta.value_width * delta.key_head_dim  # a key's value, the correction, and the output
    return RecurrentLayer(
        head_matrices=model.hidden_size * (projected + delta.value_width),
        head_vectors=2 * heads,
        whole_vectors=features * delta.conv_kernel_dim + delta.value_head_dim,
        heads=heads,
        values=delta.value_width,
        keys=delta.key_head_dim,
        convolved=features,
        projected=projected,
        needed_flops=of_states,
        computed_flops=of_states + 4 * chunk * (delta.value_width + delta.key_width) + inverses,
    )


def _mamba(model: ModelConfig) -> RecurrentLayer:
    mamba, heads, values = model.mamba, model.mamba.num_heads or 0, model.mamba.value_width
    of_groups = 2 * mamba.group_width  # keys and queries, whose matrices every tensor rank has
    of_states = 4 * values * mamba.d_state  # a value, and the output
    return RecurrentLayer(
        head_matrices=model.hidden_size * (3 * values + heads),  # of values, gates and outputs, and of steps
        whole_matrices=model.hidden_size * of_groups,
        head_vectors=values * (mamba.d_conv + 2) + 3 * heads,  # the convolution with its bias, and the norm
        whole_vectors=of_groups * (mamba.d_conv + 1),
        heads=heads,
        values=values,
        keys=mamba.d_state,
        convolved=values + of_groups,
        projected=2 * values + of_groups + heads,
        shared=of_groups if mamba.n_groups == 1 else 0,
        needed_flops=of_states,
        computed_flops=of_states + 2 * STATE_CHUNK * (values + mamba.group_width),
    )
