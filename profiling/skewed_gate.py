"""Synthetic routers: the first of E experts are chosen most, by the same distribution whatever a router has learned.

Symbols: T tokens, E experts, k choices.
"""

import jax
import jax.numpy as jnp

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.weights import expert_weights

_SPAN = 2.6  # the first expert is e^2.6 times as likely as the last one
_STEEP_SPAN = 3.4  # of `choose_steeply`
_ALWAYS = 100.0  # larger than any difference of the random numbers


def choose(logit_TE: jax.Array, moe: MoEConfig) -> TopKRouting:
    """Draw k experts without replacement, by random numbers from the bits of a token's logits, with softmax weights."""
    return _drawn(logit_TE, moe, jnp.zeros(moe.num_experts))


def choose_steeply(logit_TE: jax.Array, moe: MoEConfig) -> TopKRouting:
    """Draw like `choose`, with a larger preference: the first quarter of 16 experts has 2.4 times the mean load."""
    return _drawn(logit_TE, moe, (_SPAN - _STEEP_SPAN) * jnp.linspace(0, 1, moe.num_experts))


def choose_evenly(logit_TE: jax.Array, moe: MoEConfig) -> TopKRouting:
    """Draw like `choose`, with all experts equally likely: a balanced router that costs as much."""
    return _drawn(logit_TE, moe, _SPAN * jnp.linspace(0, 1, moe.num_experts))


def choose_one_always(logit_TE: jax.Array, moe: MoEConfig) -> TopKRouting:
    """Choose the first expert for every token, and draw the others like `choose`."""
    return _drawn(logit_TE, moe, jnp.where(jnp.arange(moe.num_experts) == 0, _ALWAYS, 0))


def _drawn(logit_TE: jax.Array, moe: MoEConfig, more_E: jax.Array) -> TopKRouting:
    gumbel_TE = -jnp.log(-jnp.log(_uniform(logit_TE)))
    likely_E = more_E - _SPAN * jnp.linspace(0, 1, moe.num_experts)
    expert_Tk = jax.lax.top_k(gumbel_TE + likely_E, moe.top_k)[1]
    prob_TE = jax.nn.softmax(logit_TE)
    weight_Tk = expert_weights(jnp.take_along_axis(prob_TE, expert_Tk, axis=1), moe)
    return TopKRouting(expert_Tk=expert_Tk, weight_Tk=weight_Tk, prob_TE=prob_TE)


def _uniform(x: jax.Array) -> jax.Array:
    """Return numbers between 0 and 1 from the bits of each number."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return (bits >> 8).astype(jnp.float32) / 2**24 + 2**-25
