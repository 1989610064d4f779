"""X-MoE (Chi et al. 2022, section 3.2): logits are cosines of tokens and experts in a space of few dimensions.

This keeps representations from collapsing towards those of experts. The temperature is learned. T tokens, D model
width, r latent width, E experts.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts, GateParameter
from moe_jax.models.gates import softmax
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, product, unit

FACTS = GateFacts(
    listed=4,
    settings=("router_rank",),
    parameters=(
        GateParameter("router_projection", ("model", "router_latent"), "normal"),
        GateParameter("router", ("router_latent", "choices"), "normal"),
        GateParameter("temperature", ("one",), 0.3),
    ),
)

_MIN_TEMPERATURE = 0.01


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
    """Choose the k largest of softmax(cos(P·x, e) / τ). A temperature τ below 0.01 counts as 0.01."""
    low_Tr = unit(product(x_TD, params["router_projection"]), axis=1)
    cosine_TE = product(low_Tr, unit(params["router"], axis=0))
    logit_TE = cosine_TE / jnp.maximum(params["temperature"], _MIN_TEMPERATURE) + params.get("router_bias", 0.0)
    return GateOutput(softmax.choose(logit_TE, moe), logit_TE)


GATE: Gate = choose
