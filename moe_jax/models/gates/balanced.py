"""Experts in rotation, with the same number of tokens for each whatever the features: for measuring speed only.

Published throughput is measured with forced balance like this. The router computes the experts' weights and is trained
as in `softmax`. T tokens, D model width, E experts, k choices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, linear
from moe_jax.models.gates.weights import expert_weights

FACTS = GateFacts(listed=12, sees_tokens=True, for_timing_only=True)

_GOLDEN_RATIO = 0.618  # multiples of an irrational number like this, modulo 1, are spread evenly


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs, moe: MoEConfig) -> GateOutput:
    """Choose k experts by the token's index in the global batch, weighted by the softmax of the router's logits.

    Any consecutive tokens give all experts the same number of (token, choice) pairs if E divides the number of pairs.
    """
    logit_TE = linear(params, x_TD)
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    expert_Tk = rotation(router_inputs.place, moe)
    score_Tk = jnp.take_along_axis(prob_TE, expert_Tk, axis=-1)
    return GateOutput(
        TopKRouting(expert_Tk=expert_Tk, weight_Tk=expert_weights(score_Tk, moe), prob_TE=prob_TE), logit_TE
    )


def rotation(place_T: Int[Array, " T"], moe: MoEConfig) -> Int[Array, "T k"]:
    """Return expert (p · stride) mod E for the pair p = token · k + choice.

    The stride and E are coprime, so E consecutive pairs choose every expert once. The stride is near the golden ratio
    times E, so consecutive pairs are spread over any number of expert ranks.
    """
    experts = moe.num_experts
    stride = next(n for n in range(max(1, round(_GOLDEN_RATIO * experts)), 2 * experts) if math.gcd(n, experts) == 1)
    # products of two numbers up to 2¹⁶, the most experts of a config, fit in 32 bits without a sign
    turn_T1 = (place_T[:, None] % experts).astype(jnp.uint32)
    pair_Tk = (turn_T1 * moe.top_k + jnp.arange(moe.top_k, dtype=jnp.uint32)) % experts
    return (pair_Tk * (stride % experts) % experts).astype(jnp.int32)


GATE: Gate = choose
