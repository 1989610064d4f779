"""Rotary position embedding, with frequencies scaled for longer sequences: one function for each kind of scaling.

B sequences, N tokens of each, H heads, K width of the rotated features.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from moe_jax.config import ModelConfig, RopeScalingConfig

Pairs = NDArray[np.float64]  # one number for each pair of features that is rotated together


def rotate(
    x_BNHK: Float[Array, "B N H K"], position_BN: Int[Array, "B N"], model: ModelConfig, length: int
) -> Float[Array, "B N H K"]:
    """Apply rotary position embedding (Su et al. 2021) to pairs (i, i + K/2), with angles in float32.

    `length` is that of the whole sequences, or the most tokens that they can have.
    """
    half, scaling = x_BNHK.shape[-1] // 2, model.rope_scaling
    if scaling.rope_type == "none":
        frequency = model.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    else:
        plain = model.rope_theta ** (-np.arange(half) / half)
        frequency = jnp.asarray(_scaled(plain, model.rope_theta, scaling, length), jnp.float32)
    angle = position_BN[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    left, right = jnp.split(x_BNHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x_BNHK.dtype)


def logit_scale(model: ModelConfig) -> float:
    """Return the factor of the products of query and key (DeepSeek-V3 2024, section 4.3, in its published code)."""
    scaling = model.rope_scaling
    plain = model.attention_multiplier or model.qk_width**-0.5
    return plain * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def _scaled(frequency: Pairs, theta: float, scaling: RopeScalingConfig, length: int) -> Pairs:
    """Return the frequencies for sequences of a length."""
    if scaling.rope_type == "longrope":  # LongRoPE (Ding et al. 2024, section 3), as in the published code of Phi-3.5
        is_long = length > scaling.original_max_position_embeddings
        return frequency / np.array(scaling.long_factor if is_long else scaling.short_factor)
    return _SCALINGS[scaling.rope_type](frequency, theta, scaling)


def _linear(frequency: Pairs, theta: float, scaling: RopeScalingConfig) -> Pairs:
    """Divide positions by a factor (Chen et al. 2023)."""
    return frequency / scaling.factor


def _llama3(frequency: Pairs, theta: float, scaling: RopeScalingConfig) -> Pairs:
    """Interpolate along a ramp over the number of turns (Llama 3, 2024, in its published code)."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    if scaling.slow_turns == scaling.fast_turns:  # there is no ramp
        return _interpolate(frequency, np.where(turns < scaling.slow_turns, 0.0, 1.0), scaling)
    unscaled = np.clip((turns - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns), 0, 1)
    return _interpolate(frequency, unscaled, scaling)


def _yarn(frequency: Pairs, theta: float, scaling: RopeScalingConfig) -> Pairs:
    """Interpolate along a ramp over the index of the pair (YaRN, Peng et al. 2023, section 3.2)."""
    pairs = len(frequency)

    def pair_of(turns: float) -> float:
        return pairs * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = (np.arange(pairs) - first) / (last - first if last > first else 1e-3)
    return _interpolate(frequency, 1 - np.clip(ramp, 0, 1), scaling)


def _interpolate(frequency: Pairs, unscaled: Pairs, scaling: RopeScalingConfig) -> Pairs:
    return frequency / scaling.factor * (1 - unscaled) + frequency * unscaled


_SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
