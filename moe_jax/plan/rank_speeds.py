"""Devices of different speeds: the slowest device of each expert rank, and the rank whose experts take longest.

A step waits for its slowest device, and a block's combine for the rank whose experts finish last. Which experts a rank
holds can be chosen (`migration.rank_speeds`); its share of the tokens cannot.
"""

from typing import NamedTuple

import numpy as np

from moe_jax.config import Config
from moe_jax.config.expert_shares import expert_counts
from moe_jax.plan.clusters import Cluster, Device


class SlowestDevices(NamedTuple):
    """The devices that all others wait for, if all experts have equal loads."""

    device: Device  # the slowest one
    expert_device: Device  # one whose experts take longest
    local_experts: float  # of this device, in a block


def rank_speeds(config: Config, cluster: Cluster) -> tuple[float, ...] | None:
    """The speed of each expert rank, that of its slowest device, relative to the cluster's device; None: all are alike.

    Devices of a mesh are in the order of its axes. If the cluster's are not known to have different speeds, those of
    `migration.rank_speeds` count, and the fastest rank is as fast as the cluster's device.
    """
    if not cluster.speeds:
        given = config.rank_speeds
        return None if given is None else tuple(speed / max(given) for speed in given)
    counts, speeds = zip(*cluster.speeds, strict=True)
    axes, sizes = ("data", "pipeline", "context", "expert", "tensor"), config.mesh.sizes
    of_devices = np.repeat(speeds, counts).reshape([sizes[axis] for axis in axes])
    others = tuple(number for number, axis in enumerate(axes) if axis not in config.mesh.expert_axes)
    return tuple(of_devices.min(axis=others).ravel().tolist())


def slowest_devices(config: Config, cluster: Cluster) -> SlowestDevices:
    """The devices that a step waits for, and the one that others wait for after a block's experts."""
    speeds = rank_speeds(config, cluster)
    if speeds is None:
        equal = config.model.moe.num_experts / config.mesh.expert_ranks(config.mesh.sizes)
        return SlowestDevices(cluster.device, cluster.device, equal)
    ranks = zip(first_counts(config, speeds), speeds, strict=True)
    count, speed = max(ranks, key=lambda rank: rank[0] / rank[1])
    return SlowestDevices(cluster.device.at_speed(min(speeds)), cluster.device.at_speed(speed), count)


def first_counts(config: Config, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """How many experts of a block each rank holds before any load is known: equally many unless experts migrate.

    They are placed by `migration.rank_speeds`, or by `speeds` without it.
    """
    moe = config.model.moe
    equal = moe.num_experts // len(speeds)
    if not config.migration.enabled or moe.capacity_factor is not None:
        return (equal,) * len(speeds)
    return expert_counts(moe.num_experts, config.rank_speeds or speeds, equal + config.replicas)
