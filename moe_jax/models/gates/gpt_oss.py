"""Top-k of logits with a bias, then a softmax over these k (gpt-oss, OpenAI 2025, model card, section 2.1.2).

Experts and weights are the same as with a renormalised softmax over all experts. With k=1 the weight is 1, and only the
auxiliary losses train the router. T tokens, E experts.
"""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import ROUTER, ROUTER_BIAS, GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_logits

FACTS = GateFacts(listed=2, parameters=(ROUTER, ROUTER_BIAS), sums_to_1=True)


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig) -> TopKRouting:
    """Choose the k highest logits, weighted by their softmax."""
    logit_Tk, expert_Tk = jax.lax.top_k(logit_TE, moe.top_k)
    weight_Tk = jax.nn.softmax(logit_Tk, axis=-1) * moe.routed_scaling_factor
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=weight_Tk, prob_TE=jax.nn.softmax(logit_TE, axis=-1))


GATE: Gate = of_logits(choose)
