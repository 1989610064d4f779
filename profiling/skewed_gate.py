"""Synthetic routers: of E experts the first are chosen most, by the same law whatever a router has learned.

T tokens, E experts, k choices.
"""

import jax
import jax.numpy as jnp

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.weights import expert_weights

_SPAN = 2.6  # the first expert is e^2.6 times as likely as the last one
_ALWAYS = 100.0  # more than random numbers are apart


def choose(logit_TE: jax.Array, moe: MoEConfig) -> TopKRouting:
    """k experts drawn without putting back, by random numbers that a token's own logits stand for; softmax weights."""
    return _drawn(logit_TE, moe, jnp.zeros(moe.num_experts))


def choose_one_always(logit_TE: jax.Array, moe: MoEConfig) -> TopKRouting:
    """The same, but every token chooses the first expert, and draws the others."""
    return _drawn(logit_TE, moe, jnp.where(jnp.arange(moe.num_experts) == 0, _ALWAYS, 0))


def _drawn(logit_TE: jax.Array, moe: MoEConfig, more_E: jax.Array) -> TopKRouting:
    gumbel_TE = -jnp.log(-jnp.log(_uniform(logit_TE)))
    likely_E = more_E - _SPAN * jnp.linspace(0, 1, moe.num_experts)
    expert_Tk = jax.lax.top_k(gumbel_TE + likely_E, moe.top_k)[1]
    prob_TE = jax.nn.softmax(logit_TE)
    weight_Tk = expert_weights(jnp.take_along_axis(prob_TE, expert_Tk, axis=1), moe)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=weight_Tk, prob_TE=prob_TE)


def _uniform(x: jax.Array) -> jax.Array:
    """Between 0 and 1, by the bits of each number."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return (bits >> 8).astype(jnp.float32) / 2**24 + 2**-25
