"""A measured machine as a cluster: the curves of its profile, and rates and links derived from them for the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from moe_jax.plan.cluster import ClusterProfile, ProfileError, read_profile
from moe_jax.plan.clusters.hardware import Cluster, Device, Level, LinkCurve, Platform
from moe_jax.plan.curves import Curve

_EXCHANGE = "all_to_all.flat"


def measured_cluster(path: Path) -> Cluster:
    """The cluster of a profile that `python -m moe_jax.measure` wrote.

    Raises ProfileError if the profile is damaged or lacks a required curve.
    """
    profile = read_profile(path)
    node, memory = profile.node_devices, 2 * _best_rate(profile, "copy")  # each byte is read and written
    if node == 1:
        levels = [Level(name="memory", devices=1, bytes_per_s=memory, ring=LinkCurve(0.0))]
    else:
        levels = [_level(profile, "inside a node", node, lambda ranks, stride: ranks * stride <= node)]
    if profile.devices > node:
        levels.append(_level(profile, "between nodes", profile.devices, lambda ranks, stride: ranks * stride > node))
    device = Device(
        name=str(profile.provenance.get("devices", profile.platform)),
        platform=cast(Platform, profile.platform),
        memory_bytes=profile.memory_bytes,
        matrix_flops_per_s=_best_rate(profile, "matmul"),
        memory_bytes_per_s=memory,
        matrix_efficiency=1.0,
        watts=None,
        dollars_per_hour=None,
        curves=tuple(curve for curve in profile.curves if curve.name.startswith(("matmul", "attention"))),
    )
    curves = tuple(curve for curve in profile.curves if "stride" in curve.settings)
    return Cluster(name=str(path), device=device, devices=profile.devices, levels=tuple(levels), curves=curves)


def _level(profile: ClusterProfile, name: str, devices: int, uses: Callable[..., bool]) -> Level:
    """A level of links from the measured exchange that uses them, between the most distant and the most devices."""
    found = [each for each in profile.curves if each.name == _EXCHANGE and uses(**each.settings)]
    if not found:
        raise _lacks(profile, f"{_EXCHANGE} {name}")
    curve = max(found, key=lambda each: (min(each.settings["stride"], profile.node_devices), each.settings["ranks"]))
    leaving = 1 - 1 / curve.settings["ranks"]
    return Level(name=name, devices=devices, bytes_per_s=leaving * _rate(curve), ring=LinkCurve(curve.alpha_s))


def _best_rate(profile: ClusterProfile, name: str) -> float:
    """The best rate per second over all sizes and settings of an operation."""
    rates = [_rate(curve) for curve in profile.curves if curve.name == name]
    if not rates:
        raise _lacks(profile, name)
    return max(rates)


def _rate(curve: Curve) -> float:
    return max(amount / seconds for amount, seconds in zip(curve.amounts, curve.median_s, strict=True))


def _lacks(profile: ClusterProfile, what: str) -> ProfileError:
    known = ", ".join(dict.fromkeys(curve.name for curve in profile.curves)) or "nothing"
    return ProfileError(
        f"the cluster profile has {known}, but no {what}: measure all operations with python -m moe_jax.measure"
    )
