"""Top-k of a softmax over all experts (Shazeer et al. 2017; Switch with k=1, Mixtral with k=2).

T tokens, E experts.
"""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_biased_logits
from moe_jax.models.gates.weights import expert_weights, top_k_scores

FACTS = GateFacts(listed=0, settings=("bias_update_rate",))


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig, bias_E: Float[Array, "... E"] | None = None) -> TopKRouting:
    """Choose the k experts with the highest probability, or probability + bias, weighted by their probability.

    Weights are renormalised if the config says so.
    """
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    score_Tk, expert_Tk = top_k_scores(prob_TE, bias_E, moe)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=expert_weights(score_Tk, moe), prob_TE=prob_TE)


GATE: Gate = of_biased_logits(choose)
