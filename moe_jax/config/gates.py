"""What settings, plans and the model have to know of each gate: its parameters, and what it looks at.

What a gate computes stands in `models/gates/`, one file each.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # a MoE asks for its gate's facts
    from moe_jax.config import Model


class Leaf(NamedTuple):
    """A parameter of a gate."""

    name: str
    dims: tuple[str, ...]  # names of its dimensions, see `gate_parameters`
    first: Literal["router", "normal", "zeros"] | float = "router"  # values; normal: products keep their scale


_ROUTER = Leaf("router", ("model", "choices"))
SCORE_BIAS = Leaf("score_bias", ("choices",), "zeros")  # counts in the choice alone: nothing is differentiated by it


@dataclass(frozen=True, kw_only=True)
class GateFacts:
    """Of one gate. It splits if each token's experts follow from that token alone: then microbatches may be cut before
    the layer; otherwise it compares all tokens of a device's batch.
    """

    splits: bool = True
    sees_tokens: bool = False  # not only features: the token's number, its place in the batch, the step
    fills_slots: bool = False  # experts or slots choose tokens, so that no slot stays empty
    parameters: tuple[Leaf, ...] = (_ROUTER,)


GATES: dict[str, GateFacts] = {
    "softmax": GateFacts(),
    "sigmoid": GateFacts(),
    "gpt_oss": GateFacts(parameters=(_ROUTER, Leaf("router_bias", ("choices",), "zeros"))),
    "noisy": GateFacts(sees_tokens=True, parameters=(_ROUTER, Leaf("router_noise", ("model", "choices"), "zeros"))),
    "xmoe": GateFacts(
        parameters=(
            Leaf("router_projection", ("model", "latent"), "normal"),
            Leaf("router", ("latent", "choices"), "normal"),
            Leaf("temperature", ("one",), 0.3),
        )
    ),
    "deepseek_v2": GateFacts(),
    "deepseek_v3": GateFacts(parameters=(_ROUTER, SCORE_BIAS)),
    "hash": GateFacts(sees_tokens=True, parameters=()),
    "random": GateFacts(sees_tokens=True, parameters=()),
    "batch_prioritised": GateFacts(splits=False),
    "expert_choice": GateFacts(splits=False, fills_slots=True),
    "softmoe": GateFacts(
        splits=False,
        fills_slots=True,
        parameters=(Leaf("slots", ("model", "choices", "slots"), "normal"), Leaf("scale", ("one",), 1.0)),
    ),
}
BIASED = ("softmax", "sigmoid", "deepseek_v3")  # may choose by score + bias
GROUPED = ("deepseek_v2", "deepseek_v3")  # know groups of experts


def facts_of(gate: str) -> GateFacts:
    """Of a gate by its name. One from elsewhere is a function of each token's logits."""
    return GATES.get(gate, GateFacts())


def gate_parameters(model: "Model") -> dict[str, tuple[dict[str, int], str | float]]:
    """Names of a block's gate's parameters; of each the sizes of its dimensions and its first values."""
    moe = model.moe
    sizes = {
        "model": model.hidden_size,
        "choices": moe.num_experts,
        "latent": moe.latent_router_width,
        "slots": moe.slots_per_expert,
        "one": 1,
    }
    leaves = moe.gate_facts.parameters
    if moe.bias and any(leaf.name == "router" for leaf in leaves):
        leaves += (Leaf("router_bias", ("choices",), "zeros"),)
    if moe.bias_update_rate is not None and SCORE_BIAS not in leaves:
        leaves += (SCORE_BIAS,)
    return {leaf.name: ({dim: sizes[dim] for dim in leaf.dims}, leaf.first) for leaf in leaves}
