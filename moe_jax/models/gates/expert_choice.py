"""Expert choice (Zhou et al. 2022, section 3.2): each expert picks the best tokens for its capacity, so loads are
equal.

Experts pick among the tokens of this device: a choice over all devices would need one more exchange. They compare all
of these tokens, so microbatches must not be split before the layer, and a token's experts also depend on later tokens
of its sequence. T tokens, D model width, E experts, C slots of an expert.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models import routing
from moe_jax.models.gates.choice import ExpertChoiceRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, linear

FACTS = GateFacts(
    listed=10,
    splits=False,
    decides="expert_choice",
    sampled_as=(("gate", "softmax"), ("norm_topk_prob", False)),
)


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
    """Choose the C likeliest tokens of each expert, weighted by their probabilities of the expert.

    Padding is less likely than all other tokens, and has the weight 0.
    """
    logit_TE = linear(params, x_TD)
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    is_padding_T = None if router_inputs is None else router_inputs.is_padding
    picked = _pick(prob_TE, is_padding_T, routing.expert_capacity(moe, len(x_TD)))
    return GateOutput(picked._replace(weight_EC=picked.weight_EC * moe.routed_scaling_factor), logit_TE)


def _pick(prob_TE: Float[Array, "T E"], is_padding_T: Bool[Array, " T"] | None, slots: int) -> ExpertChoiceRouting:
    if is_padding_T is None:
        weight_EC, token_EC = jax.lax.top_k(prob_TE.T, slots)
        return ExpertChoiceRouting(token_EC, weight_EC, prob_TE)
    score_EC, token_EC = jax.lax.top_k(jnp.where(is_padding_T, -1.0, prob_TE.T), slots)
    return ExpertChoiceRouting(token_EC, jnp.maximum(score_EC, 0), prob_TE)


GATE: Gate = choose
