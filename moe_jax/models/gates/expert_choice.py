"""Expert choice (Zhou et al. 2022, section 3.2): each expert picks the best tokens for its capacity, so loads are
equal.

Experts pick among the tokens of this device: a choice over all devices would need one more exchange. They compare all
of these tokens, so microbatches must not be split before the layer, and a token's experts also depend on later tokens
of its sequence. T tokens, E experts, C slots of an expert.
"""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models import routing
from moe_jax.models.gates.choice import ExpertChoiceRouting
from moe_jax.models.gates.protocol import Gate, of_logits

FACTS = GateFacts(
    listed=10,
    splits=False,
    decides="expert_choice",
    sampled_as=(("gate", "softmax"), ("norm_topk_prob", False)),
)


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig) -> ExpertChoiceRouting:
    """Choose the C likeliest tokens of each expert, weighted by their probabilities of the expert."""
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    weight_EC, token_EC = jax.lax.top_k(prob_TE.T, routing.expert_capacity(moe, len(logit_TE)))
    return ExpertChoiceRouting(token_EC=token_EC, weight_EC=weight_EC * moe.routed_scaling_factor, prob_TE=prob_TE)


GATE: Gate = of_logits(choose)
