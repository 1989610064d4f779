"""Experts by a hash of the token's id (Hash Layers, Roller et al. 2021, section 3.2, random hash).

Nothing is learned, and a token has the same experts in all blocks and runs. T tokens, D model width, E experts, k
choices.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput
from moe_jax.models.gates.weights import equal_weights

FACTS = GateFacts(listed=7, sees_tokens=True, parameters=())


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs, moe: MoEConfig) -> GateOutput:
    """Choose the first k experts of a random order that depends on the token id, equally weighted."""

    def scores(token_id: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(0), token_id), (moe.num_experts,))

    return GateOutput(equal_weights(jax.lax.top_k(jax.vmap(scores)(router_inputs.id), moe.top_k)[1], moe), None)


GATE: Gate = choose
