"""The parameters of a block's gate, with the sizes that a model gives them."""

from moe_jax.config.facts import ROUTER_BIAS, SCORE_BIAS
from moe_jax.config.sections import ModelConfig


def gate_parameters(model: ModelConfig) -> dict[str, tuple[dict[str, int], str | float]]:
    """Return the parameters of a block's gate by name: the sizes of their dimensions, and their initial values."""
    moe = model.moe
    sizes = {
        "model": model.hidden_size,
        "choices": moe.num_experts,
        "router_latent": moe.latent_router_width,
        "slots": moe.slots_per_expert,
        "one": 1,
    }
    leaves = moe.gate_facts.parameters
    if moe.bias and any(leaf.name == "router" for leaf in leaves):
        leaves += (ROUTER_BIAS,)
    if moe.bias_update_rate is not None and SCORE_BIAS not in leaves:
        leaves += (SCORE_BIAS,)
    return {leaf.name: ({dim: sizes[dim] for dim in leaf.dims}, leaf.first) for leaf in leaves}
