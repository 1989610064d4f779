"""What every gate provides. T tokens, D model width, E experts.

A gate is a function of its parameters, the tokens' features and what else is seen of them. Most need the router's
logits only: they are functions of these, and so is one of your own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig
from moe_jax.models.gates.choice import Decision
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.logits import linear


class Decided(NamedTuple):
    """A decision, and the logits that it comes from."""

    decision: Decision
    logit_TE: Float[Array, "T _"] | None  # None: it does not depend on what is learned


Gate = Callable[
    [Any, jax.Array, Any, MoEConfig], Decided
]  # the third is a `RouterInputs`, or None for gates that do not look at it
OfLogits = Callable[[jax.Array, MoEConfig], Decision]
OfBiasedLogits = Callable[[jax.Array, MoEConfig, jax.Array | None], Decision]


def of_logits(choose: OfLogits) -> Gate:
    """The gate that decides by a linear router's logits."""

    def decide(params: Any, x_TD: jax.Array, router_inputs: RouterInputs | None, moe: MoEConfig) -> Decided:
        logit_TE = linear(params, x_TD)
        return Decided(choose(logit_TE, moe), logit_TE)

    return decide


def of_biased_logits(choose: OfBiasedLogits) -> Gate:
    """The same of one that looks at a score bias, if there is one."""

    def decide(params: Any, x_TD: jax.Array, router_inputs: RouterInputs | None, moe: MoEConfig) -> Decided:
        logit_TE = linear(params, x_TD)
        return Decided(choose(logit_TE, moe, params.get("score_bias")), logit_TE)

    return decide
