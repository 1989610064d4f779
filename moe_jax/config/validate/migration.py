"""Rules for migration: experts that move between ranks."""

from moe_jax.config.registry import DISPATCHER_FACTS
from moe_jax.config.sections import MigrationConfig, Sections
from moe_jax.config.validate.mesh import expert_ranks_text
from moe_jax.config.validate.ranges import RANGES
from moe_jax.errors import ConfigError


def check_migration(config: Sections) -> None:
    """Raise ConfigError if no experts can be moved, or if moving them cannot save time."""
    moe, settings = config.model.moe, config.migration
    if not settings.enabled:
        if settings.rank_speeds is not None:
            raise ConfigError(
                f"{speeds_text(settings)} places experts by speed, but migration.enabled=false places none: "
                "set migration.enabled=true, or migration.rank_speeds=null"
            )
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
    if settings.rank_speeds is not None:
        _check_speeds(config)
    if config.optimizer.offload_moments:
        raise ConfigError(
            "migration.enabled=true with optimizer.offload_moments=true, whose moments would all be on the devices "
            "while experts move: use optimizer.offload_moments=false, or migration.enabled=false"
        )
    if settings.replicas > (others := moe.num_experts - 1):
        raise ConfigError(
            f"migration.replicas={settings.replicas}, and a rank has at most replicas of {others} other ranks' experts "
            f"with model.moe.num_experts={moe.num_experts}: use migration.replicas={others} or less"
        )
    if settings.replicas and moe.capacity_factor is not None:
        raise ConfigError(
            f"migration.replicas={settings.replicas} with model.moe.capacity_factor={moe.capacity_factor}, which pads "
            "replicas as it pads experts: use model.moe.capacity_factor=null, or migration.replicas=0"
        )
    if settings.replicas and config.optimizer.moments_dtype != "float32":
        raise ConfigError(
            f"migration.replicas={settings.replicas} with optimizer.moments_dtype={config.optimizer.moments_dtype}, "
            "which rounds the moments of replicas apart: use optimizer.moments_dtype=float32, or migration.replicas=0"
        )
    if settings.replicas and config.optimizer.zero:
        raise ConfigError(
            f"migration.replicas={settings.replicas} with optimizer.zero={config.optimizer.zero}, which cuts what "
            "replicas sum: use optimizer.zero=0, or migration.replicas=0"
        )


def _check_rank_speeds(config: Sections) -> None:
    """Raise ConfigError unless each expert rank has a speed; an open size is not checked."""
    sizes = config.mesh.sizes
    speeds = config.migration.rank_speeds
    if speeds is None or min(sizes[axis] for axis in config.mesh.expert_axes) == -1:
        return
    ranks = config.mesh.expert_ranks(sizes)
    if len(speeds) != ranks:
        raise ConfigError(
            f"{speeds_text(config.migration)} has {len(speeds)} speeds, and {expert_ranks_text(config.mesh)} "
            f"is {ranks} expert ranks: use {ranks} speeds, or migration.rank_speeds=null if they are equal"
        )


def _check_speeds(config: Sections) -> None:
    """Raise ConfigError for speeds that are no numbers above 0, or by which nothing can be placed."""
    text, moe = speeds_text(config.migration), config.model.moe
    least, most, *_ = RANGES["migration.rank_speeds"]
    for speed in config.migration.rank_speeds or ():
        if not least < speed <= most:  # nan, too
            raise ConfigError(
                f"{text} has {speed:.15g}: use numbers above {least} and up to {most:.15g}, e.g. [1, 0.5]"
            )
    if moe.capacity_factor is not None:
        raise ConfigError(
            f"{text} with model.moe.capacity_factor={moe.capacity_factor}, which pads the experts of all ranks alike: "
            "use model.moe.capacity_factor=null, or migration.rank_speeds=null"
        )
    _check_rank_speeds(config)


def speeds_text(settings: MigrationConfig) -> str:
    return f"migration.rank_speeds=[{', '.join(f'{speed:.15g}' for speed in settings.rank_speeds or ())}]"
