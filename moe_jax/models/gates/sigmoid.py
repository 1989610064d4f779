"""Top-k of independent sigmoid scores.

Sources: BASE layers (Lewis et al. 2021, section 3); StableMoE (Dai et al. 2022, section 3: an expert's output times the
sigmoid of its logit, with k=1); Llama 4. T tokens, E experts.
"""

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_biased_logits
from moe_jax.models.gates.weights import expert_weights, normalized, top_k_scores

FACTS = GateFacts(listed=1, settings=("bias_update_rate",))


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig, bias_E: Float[Array, "... E"] | None = None) -> TopKRouting:
    """Choose the k experts with the highest score, or score + bias, weighted by their score.

    Weights are renormalised if the config says so.
    """
    score_TE = jax.nn.sigmoid(logit_TE)
    score_Tk, expert_Tk = top_k_scores(score_TE, bias_E, moe)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=expert_weights(score_Tk, moe), prob_TE=normalized(score_TE))


GATE: Gate = of_biased_logits(choose)
