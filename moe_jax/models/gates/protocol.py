"""The interface of gates. T tokens, D model width, E experts.

A gate is a function of its parameters, the features of tokens and their other inputs. Most gates need only the logits
of a linear router: they are functions of logits, and so is a gate from outside the project.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import Decision
from moe_jax.models.gates.inputs import RouterInputs


class GateOutput(NamedTuple):
    """A decision, and the logits that it was made from."""

    decision: Decision
    logit_TE: Float[Array, "T _"] | None  # None: the decision depends on nothing learned


# the third argument is a `RouterInputs`, or None for gates that do not read it
Gate = Callable[[Any, jax.Array, Any, MoEConfig], GateOutput]
OfLogits = Callable[[jax.Array, MoEConfig], Decision]
OfBiasedLogits = Callable[[jax.Array, MoEConfig, jax.Array | None], Decision]


def of_logits(choose: OfLogits) -> Gate:
    """Return the gate that decides by the logits of a linear router."""

    def decide(params: Any, x_TD: jax.Array, router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
        logit_TE = linear(params, x_TD)
        return GateOutput(choose(logit_TE, moe), logit_TE)

    return decide


def choice_bias(params: Any, router_inputs: RouterInputs | None, moe: MoEConfig) -> Any:
    """Return what is added to scores for the choice of experts: what replays a record, or else the layer's own bias."""
    replaying = None if router_inputs is None else router_inputs.replaying_bias(moe.num_experts)
    return params.get("score_bias") if replaying is None else replaying


def of_biased_logits(choose: OfBiasedLogits) -> Gate:
    """Return the gate that decides by the logits of a linear router, and by a score bias if the layer has one."""

    def decide(params: Any, x_TD: jax.Array, router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
        logit_TE = linear(params, x_TD)
        return GateOutput(choose(logit_TE, moe, choice_bias(params, router_inputs, moe)), logit_TE)

    return decide


_TINY = 1e-12


def linear(params: Any, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """Return router logits in float32, with a bias if the router has one."""
    return product(x_TD, params["router"]) + params.get("router_bias", 0.0)


def product(x: Float[Array, "T n"], matrix: Float[Array, "n m"]) -> Float[Array, "T m"]:
    """Multiply in float32."""
    # by default, TPUs and recent GPUs would multiply in bfloat16 or TF32
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


def unit(x: jax.Array, axis: int) -> jax.Array:
    """Scale vectors along `axis` to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=axis, keepdims=True) + _TINY)
