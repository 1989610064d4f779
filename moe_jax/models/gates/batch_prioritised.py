"""Batch-prioritised routing (V-MoE, Riquelme et al. 2021, section 4): surest tokens of the batch find slots first.

It compares all tokens of a device's batch, so microbatches may not be cut before the layer. T tokens, E experts.
"""

from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates import softmax
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_logits

FACTS = GateFacts(listed=9, splits=False, sampled_as=(("gate", "softmax"),))


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig) -> TopKRouting:
    """As with a softmax, and slots by each token's highest probability."""
    choice = softmax.choose(logit_TE, moe)
    return choice._replace(priority_T=choice.prob_TE.max(axis=-1))


GATE: Gate = of_logits(choose)
