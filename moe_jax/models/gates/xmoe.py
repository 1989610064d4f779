"""X-MoE (Chi et al. 2022, section 3.2): tokens and experts meet in few dimensions, where their cosine counts.

Representations then do not collapse towards those of experts; the temperature is learned. T tokens, D model width,
r latent width, E experts.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts, GateParameter
from moe_jax.models.gates import softmax
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.logits import product
from moe_jax.models.gates.protocol import Decided, Gate
from moe_jax.models.gates.unit import unit

FACTS = GateFacts(
    listed=4,
    settings=("router_rank",),
    parameters=(
        GateParameter("router_projection", ("model", "latent"), "normal"),
        GateParameter("router", ("latent", "choices"), "normal"),
        GateParameter("temperature", ("one",), 0.3),
    ),
)

_COLDEST = 0.01


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs | None, moe: MoEConfig) -> Decided:
    """The k largest of softmax(cos(P·x, e) / τ); a temperature below 0.01 counts as that."""
    low_Tr = unit(product(x_TD, params["router_projection"]), axis=1)
    cosine_TE = product(low_Tr, unit(params["router"], axis=0))
    logit_TE = cosine_TE / jnp.maximum(params["temperature"], _COLDEST) + params.get("router_bias", 0.0)
    return Decided(softmax.choose(logit_TE, moe), logit_TE)


GATE: Gate = choose
