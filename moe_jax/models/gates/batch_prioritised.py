"""Batch-prioritised routing (V-MoE, Riquelme et al. 2021, section 4): the most confident tokens of the batch get slots
first.

It compares all tokens of a device's batch, so microbatches must not be split before the layer. T tokens, E experts.
"""

from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates import softmax
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_logits

FACTS = GateFacts(listed=9, splits=False, sampled_as=(("gate", "softmax"),))


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig) -> TopKRouting:
    """Choose as the softmax gate does, with each token's highest probability as its priority for slots."""
    choice = softmax.choose(logit_TE, moe)
    return choice._replace(priority_T=choice.prob_TE.max(axis=-1))


GATE: Gate = of_logits(choose)
