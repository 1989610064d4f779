"""Top-k of a softmax over all experts (Shazeer et al. 2017; Switch and Mixtral are k=1 and 2)."""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoE
from moe_jax.models.gates.choice import Choice


def choose(logit_TE: Float[Array, "T E"], moe: MoE) -> Choice:
    """The k likeliest experts, weighted by their probability, renormalised if the config says so."""
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    weight_Tk, expert_Tk = jax.lax.top_k(prob_TE, moe.top_k)
    if moe.normalize_weights and moe.top_k > 1:  # one renormalised weight would always be 1
        weight_Tk = weight_Tk / weight_Tk.sum(axis=-1, keepdims=True)
    return Choice(expert_Tk=expert_Tk, weight_Tk=weight_Tk * moe.routed_scale, prob_TE=prob_TE)
