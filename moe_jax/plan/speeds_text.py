"""What a plan says of devices of different speeds: the experts of each rank, and what uneven shares save."""

import dataclasses
from collections import Counter
from typing import Any

from moe_jax.config import Config
from moe_jax.config.expert_shares import expert_counts
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.rank_speeds import first_counts, rank_speeds
from moe_jax.plan.units import seconds

_UNSHARDED: dict[str, Any] = {"zero": 0, "zero_axes": None}  # as replicas need


def with_rank_speeds(config: Config, cluster: Cluster) -> Config:
    """The config with the speeds of the cluster's devices, if its experts migrate by their load."""
    speeds = rank_speeds(config, cluster)
    is_padded = config.model.moe.capacity_factor is not None
    if speeds is None or is_padded or not config.migration.enabled or config.migration.rank_speeds is not None:
        return config
    return _migrating(config, rank_speeds=speeds)


def speeds_text(config: Config, cluster: Cluster) -> str | None:
    """What ranks of different speeds cost, with equal and with uneven shares; None if all are as fast."""
    speeds = rank_speeds(config, cluster)
    if speeds is None:
        return None
    if len(speeds) == 1 or not config.model.moe.num_experts or len(set(speeds)) == 1:
        return f"devices are as slow as {min(speeds):g} × the cluster's device, and every step waits for the slowest"
    counts = first_counts(config, speeds)
    held = ", ".join(
        f"{number} rank{'s' * (number > 1)} at {speed:g} with {count} of a block's experts"
        for (speed, count), number in sorted(Counter(zip(speeds, counts, strict=True)).items(), reverse=True)
    )
    found = _other_shares(config, cluster, speeds, counts)
    return f"{held}, and every step waits for the slowest{found and f'. {found}'}"


def _other_shares(config: Config, cluster: Cluster, speeds: tuple[float, ...], counts: tuple[int, ...]) -> str:
    """The step with equal shares if they are uneven, or else with the best uneven ones and the settings for these."""
    if len(set(counts)) > 1:
        equal = _migrating(config, rank_speeds=speeds, replicas=0)
        return f"With equal shares a step would take {_seconds(equal, cluster)}"
    if (factor := config.model.moe.capacity_factor) is not None:
        return f"model.moe.capacity_factor={factor:g} pads all experts alike: uneven shares need null"
    most = max(expert_counts(config.model.moe.num_experts, speeds, config.model.moe.num_experts)) - counts[0]
    choices = [(1 << power) for power in range(most.bit_length())]
    tried = dict[float, Config]()
    try:
        for replicas in {*choices, most} - {0}:
            unsharded = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **_UNSHARDED))
            uneven = _migrating(unsharded, enabled=True, rank_speeds=speeds, replicas=replicas)
            tried[estimate(uneven, cluster).step_s] = uneven
    except ConfigError as error:
        return f"Uneven shares are refused: {error}"
    if not tried:
        return ""
    uneven = tried[min(tried)]
    return (
        f"With uneven shares a step would take {_seconds(uneven, cluster)}: plan again with migration.enabled=true "
        f"migration.rank_speeds=[{','.join(f'{speed:g}' for speed in speeds)}] "
        f"migration.replicas={uneven.migration.replicas}{' optimizer.zero=0' if config.optimizer.zero else ''}"
    )


def _seconds(config: Config, cluster: Cluster) -> str:
    return seconds(estimate(config, cluster).step_s)


def _migrating(config: Config, **settings: Any) -> Config:
    return dataclasses.replace(config, migration=dataclasses.replace(config.migration, **settings))
