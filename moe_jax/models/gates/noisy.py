"""Noisy top-k with a random second expert.

Logits get noise with a learned deviation (Shazeer et al. 2017, section 2.1). Each choice after the first is kept with a
probability that grows with its weight (GShard, Lepikhin et al. 2020, section 2.2). Evaluation does neither.

T tokens, D model width, E experts, k choices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import ROUTER, GateFacts, GateParameter
from moe_jax.models.gates import softmax
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, linear, product

FACTS = GateFacts(
    listed=3, sees_tokens=True, parameters=(ROUTER, GateParameter("router_noise", ("model", "choices"), "zeros"))
)

_NORMAL, _UNIFORM = 0, 1  # streams of a token's random numbers


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs, moe: MoEConfig) -> GateOutput:
    """Compute softmax(top-k(x·W + N(0,1)·softplus(x·W_noise))). Choice j > 1 is skipped unless 2·g_j > U(0,1)."""
    logit_TE = linear(params, x_TD)
    if router_inputs.key is None:
        return GateOutput(softmax.choose(logit_TE, moe), logit_TE)
    normal_TE = _draw(router_inputs, _NORMAL, jax.random.normal, moe.num_experts)
    logit_TE += normal_TE * jax.nn.softplus(product(x_TD, params["router_noise"]))
    choice = softmax.choose(logit_TE, moe)
    keep_mask_Tk = _keep_mask(
        choice.weight_Tk / moe.routed_scaling_factor, _draw(router_inputs, _UNIFORM, jax.random.uniform, moe.top_k)
    )
    return GateOutput(choice._replace(expert_Tk=jnp.where(keep_mask_Tk, choice.expert_Tk, moe.num_experts)), logit_TE)


def _keep_mask(weight_Tk: Float[Array, "T k"], uniform_Tk: Float[Array, "T k"]) -> Bool[Array, "T k"]:
    """Keep the best choice, and others with probability min(1, 2·weight)."""
    return (2 * weight_Tk > uniform_Tk).at[:, 0].set(True)


def _draw(router_inputs: RouterInputs, stream: int, draw: Any, count: int) -> Float[Array, "T _"]:
    return jax.vmap(lambda key: draw(jax.random.fold_in(key, stream), (count,)))(router_inputs.keys())


GATE: Gate = choose
