"""SparseMixer-v2 (Liu et al. 2024, "GRIN: GRadient-INformed MoE", section 2), as in Phi-3.5-MoE.

Choices are made one after the other, each among the experts that are left. In training an expert is drawn by the
softmax of the candidates, those whose logit is near the best one; the gradient of its weight is that of its
probability, estimated by Heun's third-order method. In evaluation the best candidate is chosen.

T tokens, D model width, E experts, k choices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.config import MoEConfig
from moe_jax.config.facts import GateFacts
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import Gate, GateOutput, linear

FACTS = GateFacts(listed=3, sees_tokens=True, ignores_norm=True, settings=("router_jitter_noise",))

_GUMBEL, _UNIFORM = 0, 1  # streams of a token's random numbers
_UNSEEN, _SCALE = 0.75, 1 / 3  # this share of drawn experts that are not the best one have this part of their weight


def choose(params: Any, x_TD: Float[Array, "T D"], router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
    """Choose k experts, each weighted by its probability among the candidates of its choice."""
    logit_TE = linear(params, x_TD)
    left_TE, experts, weights = logit_TE, [], []
    for choice in range(moe.top_k):
        candidate_TE = jnp.where(_is_far(logit_TE, left_TE, moe.router_jitter_noise), -jnp.inf, left_TE)
        prob_TE, best_T = jax.nn.softmax(candidate_TE, axis=-1), jnp.argmax(left_TE, axis=-1)
        expert_T, scale_T = best_T, None
        if router_inputs is not None and router_inputs.key is not None:
            expert_T = jnp.argmax(candidate_TE + _draw(router_inputs, choice, _GUMBEL, moe.num_experts), axis=-1)
            is_kept_T = _draw(router_inputs, choice, _UNIFORM, 1)[:, 0] > _UNSEEN
            scale_T = jnp.where((expert_T == best_T) | is_kept_T, 1.0, _SCALE)
        weight_T = jnp.take_along_axis(prob_TE, expert_T[:, None], axis=-1)[:, 0]
        if scale_T is not None:  # which the gradient leaves out
            weight_T += jax.lax.stop_gradient(weight_T * (scale_T - 1))
        experts.append(expert_T)
        weights.append(weight_T)
        left_TE = jnp.where(jax.nn.one_hot(expert_T, moe.num_experts, dtype=bool), -jnp.inf, left_TE)
    weight_Tk = jnp.stack(weights, axis=1) * moe.routed_scaling_factor
    prob_TE = jax.nn.softmax(logit_TE, axis=-1)
    return GateOutput(TopKRouting(jnp.stack(experts, axis=1).astype(jnp.int32), weight_Tk, prob_TE), logit_TE)


def _is_far(logit_TE: Float[Array, "T E"], left_TE: Float[Array, "T E"], noise: float) -> Bool[Array, "T E"]:
    """Whether an expert's logit is so far below the best one of those left that it is no candidate."""
    best_T1 = left_TE.max(axis=-1, keepdims=True)
    return (best_T1 - left_TE) / jnp.maximum(jnp.abs(logit_TE), best_T1) > 2 * noise


def _draw(router_inputs: RouterInputs, choice: int, stream: int, count: int) -> Float[Array, "T _"]:
    draw: Any = jax.random.gumbel if stream == _GUMBEL else jax.random.uniform
    return jax.vmap(lambda key: draw(jax.random.fold_in(key, 2 * choice + stream), (count,)))(router_inputs.keys())


GATE: Gate = choose
