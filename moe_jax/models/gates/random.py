"""Experts drawn at random for each token, block and step (THOR, Zuo et al. 2022, section 4.1): nothing is learned.

In evaluation they depend only on the place of a token and the block. T tokens, D model width, E experts, k choices.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput
from moe_jax.models.gates.weights import equal_weights

FACTS = GateFacts(listed=8, sees_tokens=True, parameters=())


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs, moe: MoEConfig) -> GateOutput:
    """Choose k different experts uniformly at random, equally weighted."""
    score_TE = jax.vmap(lambda key: jax.random.uniform(key, (moe.num_experts,)))(router_inputs.keys())
    return GateOutput(equal_weights(jax.lax.top_k(score_TE, moe.top_k)[1], moe), None)


GATE: Gate = choose
