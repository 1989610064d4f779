"""The weights of experts' outputs, from scores. T tokens, E experts, k choices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import TopKRouting

_TINY = 1e-18  # the smallest divisor: its square, which the gradient divides by, is a normal float32


def top_k_scores(
    score_TE: Float[Array, "T E"], bias_E: Float[Array, "... E"] | None, moe: MoEConfig
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Return scores and indices of the k experts with the highest score, or score + bias (Wang et al. 2024, eq. 3)."""
    if bias_E is None:
        score_Tk, expert_Tk = jax.lax.top_k(score_TE, moe.top_k)
        return score_Tk, expert_Tk
    expert_Tk = jax.lax.top_k(jax.lax.stop_gradient(score_TE + bias_E), moe.top_k)[1]
    return jnp.take_along_axis(score_TE, expert_Tk, axis=-1), expert_Tk


def expert_weights(score_Tk: Float[Array, "T k"], moe: MoEConfig) -> Float[Array, "T k"]:
    """Return the scores of the chosen experts, renormalised if the config says so, times the routed scaling factor."""
    if moe.divides_by_sum:
        score_Tk = normalized(score_Tk)
    return score_Tk * moe.routed_scaling_factor


def normalized(score: Float[Array, "T n"]) -> Float[Array, "T n"]:
    """Scale rows of scores, which are not negative, to a sum of 1. A row of zeros stays 0, and its gradient finite."""
    return score / jnp.maximum(score.sum(axis=-1, keepdims=True), _TINY)


def equal_weights(expert_Tk: Int[Array, "T k"], moe: MoEConfig) -> TopKRouting:
    """Return the routing to experts that were not chosen by learned scores.

    They have equal weights, and equal probabilities.
    """
    tokens, choices = expert_Tk.shape
    prob_TE = jax.nn.one_hot(expert_Tk, moe.num_experts).sum(axis=1) / choices
    weight_Tk = jnp.full((tokens, choices), moe.routed_scaling_factor / choices, jnp.float32)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=weight_Tk, prob_TE=prob_TE)
