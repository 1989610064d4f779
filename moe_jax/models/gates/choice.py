"""What a gate decides. T tokens of this device, E experts, k choices, C slots of an expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class TopKRouting(NamedTuple):
    """Each token's experts, best first. E: none, a choice that the token does without."""

    expert_Tk: Int[Array, "T k"]
    weight_Tk: Float[Array, "T k"]  # factor on the expert's output, float32
    prob_TE: Float[Array, "T E"]  # rows sum to 1; what the load-balance loss looks at
    priority_T: Float[Array, " T"] | None = None  # tokens with more of it find slots first; None: in their order

    def tokens_per_expert(self) -> Int[Array, " E"]:
        """How many (token, choice) pairs each expert was chosen by, kept or not."""
        return tokens_per_expert(self.expert_Tk, self.prob_TE.shape[1])


class ExpertChoiceRouting(NamedTuple):
    """Each expert's tokens, best first."""

    token_EC: Int[Array, "E C"]
    weight_EC: Float[Array, "E C"]
    prob_TE: Float[Array, "T E"]

    def tokens_per_expert(self) -> Int[Array, " E"]:
        """How many tokens each expert picked."""
        return jnp.full(len(self.token_EC), self.token_EC.shape[1], jnp.int32)


class SoftRouting(NamedTuple):
    """Each slot's mix of all tokens, and each token's of all slots."""

    dispatch_TEC: Float[Array, "T E C"]  # of a slot they sum to 1
    combine_TEC: Float[Array, "T E C"]  # of a token they sum to 1
    prob_TE: Float[Array, "T E"]

    def tokens_per_expert(self) -> Int[Array, " E"]:
        """How many slots each expert has: no token is in one alone."""
        return jnp.full(self.dispatch_TEC.shape[1], self.dispatch_TEC.shape[2], jnp.int32)


Decision = TopKRouting | ExpertChoiceRouting | SoftRouting


def tokens_per_expert(expert_Tk: Int[Array, "T k"], num_experts: int) -> Int[Array, " E"]:
    """How many pairs each expert was chosen by; numbers from `num_experts` on are nobody."""
    return jnp.zeros(num_experts, jnp.int32).at[expert_Tk.ravel()].add(1, mode="drop")
