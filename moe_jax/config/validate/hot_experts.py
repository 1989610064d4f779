"""Rules for copies of the most loaded experts in each step."""

from moe_jax.config.sections import Sections
from moe_jax.config.validate.migration import speeds_text
from moe_jax.errors import ConfigError


def check_hot_experts(config: Sections) -> None:
    """Raise ConfigError if no experts can be copied in a step, or if copies cannot save time."""
    moe, mesh, hot = config.model.moe, config.mesh, config.exchange.hot_experts
    if not hot:
        return
    name, without = f"exchange.hot_experts={hot}", "or exchange.hot_experts=0"
    if hot > moe.num_experts:
        raise ConfigError(
            f"{name} is more than model.moe.num_experts={moe.num_experts}: use "
            f"exchange.hot_experts={moe.num_experts} or less"
        )
    if moe.gate_facts.fills_slots:
        raise ConfigError(f"{name}, and model.moe.gate={moe.gate} loads all experts alike: use another gate, {without}")
    if not moe.sorts_rows:
        raise ConfigError(
            f"{name} with model.moe.dispatcher={moe.dispatcher}, which sends no sorted rows: use "
            f"model.moe.dispatcher=sort, {without}"
        )
    if moe.capacity_factor is not None:
        raise ConfigError(
            f"{name} with model.moe.capacity_factor={moe.capacity_factor}, which pads all experts alike, so that "
            f"copies make no step faster: use model.moe.capacity_factor=null, {without}"
        )
    if config.migration.rank_speeds is not None:
        raise ConfigError(
            f"{name} with {speeds_text(config.migration)}: copies even out loads as if all "
            f"ranks were equally fast: use migration.rank_speeds=null, {without}"
        )
    if moe.has_hooks:
        raise ConfigError(
            f"{name} with model.moe.hooks={moe.hooks}, which change rows that are sent, and rows of copies are not: "
            f"use model.moe.hooks=none, {without}"
        )
    if mesh.expert_axes == ("expert",) and mesh.expert == 1:
        raise ConfigError(
            f"{name}, and with mesh.expert=1 one rank has all experts: use mesh.expert=2 or more, {without}"
        )
    if mesh.tensor > 1 and not mesh.experts_over_tensor:
        raise ConfigError(
            f"{name} with mesh.tensor={mesh.tensor}, whose ranks share each expert: use mesh.experts_over_tensor=true, "
            f"mesh.tensor=1, {without}"
        )
