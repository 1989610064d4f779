"""Soft MoE (Puigcerver et al. 2024, sections 2.1 and 2.3): slots are convex mixes of tokens, and tokens of slots.

A slot mixes all tokens of this device, so microbatches must not be split before the layer. These include later tokens
of a sequence: in a decoder, training reads tokens that sampling does not have yet. T tokens, D model width, E experts,
C slots of each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts, GateParameter
from moe_jax.models.gates.choice import SoftRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, product, unit

FACTS = GateFacts(
    listed=11,
    splits=False,
    decides="soft",
    settings=("slots_per_expert",),
    parameters=(GateParameter("slots", ("model", "choices", "slots"), "normal"), GateParameter("scale", ("one",), 1.0)),
)

_NO_INPUT = -1e30  # a logit whose exponential is 0; a softmax of infinities only would be NaN


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
    """Compute scaled cosines of tokens and slots.

    Their softmax over tokens gives the inputs of slots, and their softmax over all slots the outputs of tokens. Padding
    is no input, unless a device has nothing else.
    """
    slots_DS = params["slots"].reshape(x_TD.shape[1], -1)
    logit_TS = product(unit(x_TD.astype(slots_DS.dtype), axis=1), params["scale"] * unit(slots_DS, axis=0))
    by_expert = (len(x_TD), moe.num_experts, moe.slots_per_expert)
    input_TS = logit_TS
    if router_inputs is not None and router_inputs.is_padding is not None:
        input_TS = jnp.where(router_inputs.is_padding[:, None], _NO_INPUT, logit_TS)
    combine_TEC = jax.nn.softmax(logit_TS, axis=1).reshape(by_expert)
    mixed = SoftRouting(
        dispatch_TEC=jax.nn.softmax(input_TS, axis=0).reshape(by_expert),
        combine_TEC=combine_TEC * moe.routed_scaling_factor,
        prob_TE=combine_TEC.sum(axis=-1),
    )
    return GateOutput(mixed, logit_TS)


GATE: Gate = choose
