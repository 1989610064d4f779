"""A block's router: the sizes of the parameters that its gate declares."""

from moe_jax.config.facts import ROUTER_BIAS, SCORE_BIAS
from moe_jax.config.sections import ModelConfig


def gate_parameters(model: ModelConfig) -> dict[str, tuple[dict[str, int], str | float]]:
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
        leaves += (ROUTER_BIAS,)
    if moe.bias_update_rate is not None and SCORE_BIAS not in leaves:
        leaves += (SCORE_BIAS,)
    return {leaf.name: ({dim: sizes[dim] for dim in leaf.dims}, leaf.first) for leaf in leaves}
