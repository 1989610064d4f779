"""Rules for migration: experts that move between ranks."""

from moe_jax.config.registry import DISPATCHER_FACTS
from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError


def check_migration(config: Sections) -> None:
    """Raise ConfigError if no experts can be moved, or if moving them cannot save time."""
    moe, settings = config.model.moe, config.migration
    if not settings.enabled:
        return
    if moe.num_experts == 0:
        raise ConfigError(
            "migration.enabled=true, and with model.moe.num_experts=0 there are no experts: "
            "set model.moe.num_experts, or migration.enabled=false"
        )
    if moe.gate_facts.fills_slots:
        raise ConfigError(
            f"migration.enabled=true, and model.moe.gate={moe.gate} loads all experts alike: "
            "use another gate, or migration.enabled=false"
        )
    if not DISPATCHER_FACTS.of(moe.dispatcher).sorts_rows:
        raise ConfigError(
            f"migration.enabled=true with model.moe.dispatcher={moe.dispatcher}, which may add up in an order that "
            "depends on where experts are stored: use model.moe.dispatcher=sort, or migration.enabled=false"
        )
    if config.mesh.expert_axes == ("expert",) and config.mesh.expert == 1:
        raise ConfigError(
            "migration.enabled=true, and with mesh.expert=1 one rank has all experts: "
            "use mesh.expert=2 or more, or migration.enabled=false"
        )
    if moe.capacity_factor is not None and settings.payback_steps is not None:
        raise ConfigError(
            f"migration.enabled=true with model.moe.capacity_factor={moe.capacity_factor}, which pads all experts "
            "alike, so that no step is faster after a move: use model.moe.capacity_factor=null, or "
            "migration.payback_steps=null to move all the same"
        )
    if config.optimizer.offload_moments:
        raise ConfigError(
            "migration.enabled=true with optimizer.offload_moments=true, whose moments would all be on the devices "
            "while experts move: use optimizer.offload_moments=false, or migration.enabled=false"
        )
    if settings.replicas and moe.capacity_factor is not None:
        raise ConfigError(
            f"migration.replicas={settings.replicas} with model.moe.capacity_factor={moe.capacity_factor}, which pads "
            "copies as it pads experts: use model.moe.capacity_factor=null, or migration.replicas=0"
        )
    if settings.replicas and config.optimizer.moments_dtype != "float32":
        raise ConfigError(
            f"migration.replicas={settings.replicas} with optimizer.moments_dtype={config.optimizer.moments_dtype}, "
            "which rounds the moments of copies apart: use optimizer.moments_dtype=float32, or migration.replicas=0"
        )
    if settings.replicas and config.optimizer.zero:
        raise ConfigError(
            f"migration.replicas={settings.replicas} with optimizer.zero={config.optimizer.zero}, which cuts what "
            "copies sum: use optimizer.zero=0, or migration.replicas=0"
        )
