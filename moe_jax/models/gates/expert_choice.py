"""Expert choice (Zhou et al. 2022, section 3.2): each expert picks its capacity's best tokens, so all loads are equal.

It picks among the tokens of this device: a choice over all devices would take one more exchange. It compares them all,
so microbatches may not be cut before the layer; a token's experts also depend on tokens behind it in its sequence.
T tokens, E experts, C slots of an expert.
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
    """The C likeliest tokens of each expert, weighted by their probability of it."""
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    weight_EC, token_EC = jax.lax.top_k(prob_TE.T, routing.expert_capacity(moe, len(logit_TE)))
    return ExpertChoiceRouting(token_EC=token_EC, weight_EC=weight_EC * moe.routed_scaling_factor, prob_TE=prob_TE)


GATE: Gate = of_logits(choose)
