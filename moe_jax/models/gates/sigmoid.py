"""Top-k of independent sigmoid scores (BASE layers, Lewis et al. 2021; DeepSeek-V3 2024)."""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoE
from moe_jax.models.gates.choice import Choice

_TINY = 1e-20  # keeps a token without any score finite


def choose(logit_TE: Float[Array, "T E"], moe: MoE) -> Choice:
    """The k highest scores, weighted by the score, renormalised if the config says so."""
    score_TE = jax.nn.sigmoid(logit_TE)
    weight_Tk, expert_Tk = jax.lax.top_k(score_TE, moe.top_k)
    if moe.normalize_weights and moe.top_k > 1:  # one renormalised weight would always be 1
        weight_Tk = weight_Tk / (weight_Tk.sum(axis=-1, keepdims=True) + _TINY)
    prob_TE = score_TE / (score_TE.sum(axis=-1, keepdims=True) + _TINY)
    return Choice(expert_Tk=expert_Tk, weight_Tk=weight_Tk * moe.routed_scale, prob_TE=prob_TE)
