"""From scores to experts and the weights of their outputs.

Experts may be in groups (DeepSeek-V2, 2024, section 2.1.4): a token's experts come from few groups, so from
few devices.

T tokens, E experts, G groups, k choices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import TopKRouting


def mask_other_groups(
    score_TE: Float[Array, "T E"], moe: MoEConfig, score_of_group: Callable[[jax.Array], jax.Array]
) -> Float[Array, "T E"]:
    """Return the scores in each token's `topk_group` best groups, and -∞ in other groups.

    `score_of_group` maps scores [T, G, E/G] to scores of groups [T, G].
    """
    if moe.topk_group == moe.n_group:
        return score_TE
    grouped = score_TE.reshape(len(score_TE), moe.n_group, -1)
    _, group_Tg = jax.lax.top_k(score_of_group(grouped), moe.topk_group)
    allowed_TG = jax.nn.one_hot(group_Tg, moe.n_group, dtype=bool).any(axis=1)
    return jnp.where(allowed_TG[..., None], grouped, -jnp.inf).reshape(score_TE.shape)


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
