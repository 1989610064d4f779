"""Sigmoid scores, chosen with a bias and limited to groups by their two best (DeepSeek-V3, 2024, section 2.1.2).

The bias of an expert counts for the choice and not for the weights, so it has no gradient: `step/router_bias.py`
updates it next to the optimizer. T tokens, D model width, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import ROUTER, SCORE_BIAS, GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, choice_bias, linear
from moe_jax.models.gates.weights import expert_weights, mask_other_groups, normalized

FACTS = GateFacts(
    listed=6,
    parameters=(ROUTER, SCORE_BIAS),
    settings=("n_group", "topk_group", "bias_update_rate"),
    group_scorers=2,
)


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
    """Choose the k experts with the highest biased scores, weighted by their scores without bias."""
    logit_TE = linear(params, x_TD)
    score_TE = jax.nn.sigmoid(logit_TE)
    biased_TE = jax.lax.stop_gradient(score_TE + choice_bias(params, router_inputs, moe))
    allowed_TE = mask_other_groups(biased_TE, moe, _sum_of_best_two)
    expert_Tk = jax.lax.top_k(allowed_TE, moe.top_k)[1]
    weight_Tk = expert_weights(jnp.take_along_axis(score_TE, expert_Tk, axis=-1), moe)
    return GateOutput(TopKRouting(expert_Tk=expert_Tk, weight_Tk=weight_Tk, prob_TE=normalized(score_TE)), logit_TE)


def _sum_of_best_two(grouped: jax.Array) -> jax.Array:
    return jax.lax.top_k(grouped, 2)[0].sum(axis=-1)


GATE: Gate = choose
