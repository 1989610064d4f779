"""Top-k of a softmax over all experts (Shazeer et al. 2017; Switch and Mixtral are k=1 and 2).

T tokens, E experts.
"""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_biased_logits
from moe_jax.models.gates.weights import best_of, weights_of

FACTS = GateFacts(listed=0, settings=("bias_update_rate",))


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig, bias_E: Float[Array, " E"] | None = None) -> TopKRouting:
    """The k likeliest experts, or those of the highest probability + bias, weighted by their probability.

    Renormalised if the config says so.
    """
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    score_Tk, expert_Tk = best_of(prob_TE, bias_E, moe)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=weights_of(score_Tk, moe), prob_TE=prob_TE)


GATE: Gate = of_biased_logits(choose)
