"""From scores to the weights of experts' outputs. T tokens, E experts, k choices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import TopKRouting

TINY = 1e-20  # keeps a token without any score finite


def best_of(
    score_TE: Float[Array, "T E"], bias_E: Float[Array, " E"] | None, moe: MoEConfig
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Scores and numbers of the k experts with the highest score + bias (Wang et al. 2024, eq. 3), or score alone."""
    if bias_E is None:
        score_Tk, expert_Tk = jax.lax.top_k(score_TE, moe.top_k)
        return score_Tk, expert_Tk
    expert_Tk = jax.lax.top_k(jax.lax.stop_gradient(score_TE + bias_E), moe.top_k)[1]
    return jnp.take_along_axis(score_TE, expert_Tk, axis=-1), expert_Tk


def weights_of(score_Tk: Float[Array, "T k"], moe: MoEConfig) -> Float[Array, "T k"]:
    """The scores of the chosen experts, renormalised if the config says so, times its factor."""
    if moe.divides_by_sum:
        score_Tk = normalized(score_Tk)
    return score_Tk * moe.routed_scaling_factor


def normalized(score: Float[Array, "T n"]) -> Float[Array, "T n"]:
    """Rows that sum to 1."""
    return score / (score.sum(axis=-1, keepdims=True) + TINY)


def equal_weights(expert_Tk: Int[Array, "T k"], moe: MoEConfig) -> TopKRouting:
    """Experts that nothing learned has chosen, as likely as they count."""
    tokens, choices = expert_Tk.shape
    prob_TE = jax.nn.one_hot(expert_Tk, moe.num_experts).sum(axis=1) / choices
    weight_Tk = jnp.full((tokens, choices), moe.routed_scaling_factor / choices, jnp.float32)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=weight_Tk, prob_TE=prob_TE)
