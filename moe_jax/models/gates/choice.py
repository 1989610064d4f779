"""The decisions of gates. T tokens of this device, E experts, k choices, C slots of an expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TopKRouting(NamedTuple):
    """The experts of each token, best first. Index E means no expert: the token skips this choice."""

    expert_Tk: Int[Array, "T k"]
    weight_Tk: Float[Array, "T k"]  # factor on the expert's output, float32
    prob_TE: Float[Array, "T E"]  # rows sum to 1, or to 0 for padding; read by the load-balance loss
    priority_T: Float[Array, " T"] | None = (
        None  # tokens with higher priority get slots first; None: in the order of tokens
    )

    def tokens_per_expert(self) -> Int[Array, " E"]:
        """Return how many (token, choice) pairs chose each expert, dropped pairs included."""
        return tokens_per_expert(self.expert_Tk, self.prob_TE.shape[1])

    def without(self, is_padding_T: Bool[Array, " T"]) -> "TopKRouting":
        """Return the decision with no experts for padding."""
        experts, of_token_T1 = self.prob_TE.shape[1], is_padding_T[:, None]
        return self._replace(
            expert_Tk=jnp.where(of_token_T1, experts, self.expert_Tk),
            weight_Tk=jnp.where(of_token_T1, 0, self.weight_Tk),
            prob_TE=jnp.where(of_token_T1, 0, self.prob_TE),
        )


class ExpertChoiceRouting(NamedTuple):
    """The tokens of each expert, best first."""

    token_EC: Int[Array, "E C"]
    weight_EC: Float[Array, "E C"]
    prob_TE: Float[Array, "T E"]

    def tokens_per_expert(self) -> Int[Array, " E"]:
        """Return how many tokens each expert picked."""
        return jnp.full(len(self.token_EC), self.token_EC.shape[1], jnp.int32)

    def without(self, is_padding_T: Bool[Array, " T"]) -> "ExpertChoiceRouting":
        """Return the decision with no probabilities of padding, which the gate itself has ranked last."""
        return self._replace(prob_TE=jnp.where(is_padding_T[:, None], 0, self.prob_TE))


class SoftRouting(NamedTuple):
    """The weights of all tokens in each slot, and the weights of all slots for each token."""

    dispatch_TEC: Float[Array, "T E C"]  # the weights of a slot sum to 1
    combine_TEC: Float[Array, "T E C"]  # the weights of a token sum to 1
    prob_TE: Float[Array, "T E"]

    def tokens_per_expert(self) -> Int[Array, " E"]:
        """Return how many slots each expert has, because each slot mixes all tokens."""
        return jnp.full(self.dispatch_TEC.shape[1], self.dispatch_TEC.shape[2], jnp.int32)

    def without(self, is_padding_T: Bool[Array, " T"]) -> "SoftRouting":
        """Return the decision with no probabilities of padding, which the gate itself has left out of all slots."""
        return self._replace(prob_TE=jnp.where(is_padding_T[:, None], 0, self.prob_TE))


Decision = TopKRouting | ExpertChoiceRouting | SoftRouting


def tokens_per_expert(expert_Tk: Int[Array, "T k"], num_experts: int) -> Int[Array, " E"]:
    """Return how many pairs chose each expert. Indices from `num_experts` on are ignored."""
    return jnp.zeros(num_experts, jnp.int32).at[expert_Tk.ravel()].add(1, mode="drop")
