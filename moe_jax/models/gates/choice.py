"""What a gate decides. T tokens, E experts, k choices."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Choice(NamedTuple):
    """Each token's experts, best first."""

    expert_Tk: Int[Array, "T k"]
    weight_Tk: Float[Array, "T k"]  # factor on the expert's output, float32
    prob_TE: Float[Array, "T E"]  # rows sum to 1; what the load-balance loss looks at
