"""Experts in rotation, the same number of tokens for each, whatever the features: for measuring speed only.

Published throughput is measured with a forced balance like this one. The router computes and learns its weights as
that of `softmax`. T tokens, D model width, E experts, k choices.
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
from moe_jax.models.gates.logits import linear
from moe_jax.models.gates.protocol import Gate, GateOutput
from moe_jax.models.gates.weights import expert_weights

FACTS = GateFacts(listed=12, sees_tokens=True, for_timing_only=True)

_GOLDEN_RATIO = 0.618  # multiples of an irrational number like this, modulo 1, are spread evenly


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs, moe: MoEConfig) -> GateOutput:
    """Choose k experts by the token's index in the global batch, weighted by the softmax of the router's logits.

    Experts have equally many of any consecutive tokens whose (token, choice) pairs are a multiple of E.
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

    The stride has no divisor in common with E, so E consecutive pairs meet every expert once. It is near the golden
    ratio times E, so consecutive pairs are spread over expert ranks, however many there are.
    """
    experts = moe.num_experts
    stride = next(n for n in range(max(1, round(_GOLDEN_RATIO * experts)), 2 * experts) if math.gcd(n, experts) == 1)
    # products of two numbers up to 2¹⁶, the most experts of a config, fit in 32 bits without a sign
    turn_T1 = (place_T[:, None] % experts).astype(jnp.uint32)
    pair_Tk = (turn_T1 * moe.top_k + jnp.arange(moe.top_k, dtype=jnp.uint32)) % experts
    return (pair_Tk * (stride % experts) % experts).astype(jnp.int32)


GATE: Gate = choose
