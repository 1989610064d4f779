"""Softmax limited to groups by their best expert (DeepSeek-V2, 2024, section 2.1.4, device-limited routing).

T tokens, E experts.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.protocol import Gate, of_logits
from moe_jax.models.gates.weights import expert_weights, mask_other_groups

FACTS = GateFacts(listed=5, settings=("n_group", "topk_group"), group_scorers=1)


def choose(logit_TE: Float[Array, "T E"], moe: MoEConfig) -> TopKRouting:
    """Choose the k likeliest experts in the groups whose best experts are likeliest."""
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    allowed_TE = mask_other_groups(prob_TE, moe, lambda grouped: jnp.max(grouped, axis=-1))
    score_Tk, expert_Tk = jax.lax.top_k(allowed_TE, moe.top_k)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=expert_weights(score_Tk, moe), prob_TE=prob_TE)


GATE: Gate = of_logits(choose)
