"""Measured machines: the profile of a machine as a JSON file, and the cluster that it describes.

The cluster has the curves of the profile, and rates and links derived from them for the rest.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moe_jax.errors import UserError
from moe_jax.files.atomic import write_atomically
from moe_jax.files.untrusted import read_named_json
from moe_jax.plan.clusters.hardware import Cluster, Device, Level, LinkCurve, Platform
from moe_jax.plan.curves import Curve, label


class ProfileError(UserError):
    """A cluster profile that is missing or damaged, or that lacks a required curve."""


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """The measured curves of one machine."""

    platform: str  # tpu, gpu or cpu
    devices: int
    processes: int
    node_devices: int  # neighbouring devices that fast links connect
    curves: tuple[Curve, ...]
    provenance: dict[str, Any]
    memory_bytes: int | None = None  # memory of a device that jax can use; None: unknown

    def find(self, name: str, **settings: int) -> Curve:
        """The curve of an operation. Raises ProfileError."""
        for each in self.curves:
            if (each.name, each.settings) == (name, settings):
                return each
        asked = label(name, settings)
        known = ", ".join(each.label for each in self.curves if each.name == name)
        raise ProfileError(
            f"the cluster profile has no {asked}: measure it, or use one of {known or 'its other operations'}"
        )


def write_profile(path: Path, profile: ClusterProfile) -> None:
    """Write a profile atomically."""
    write_atomically(path, json.dumps(dataclasses.asdict(profile), indent=1) + "\n")


def read_profile(path: Path) -> ClusterProfile:
    """Read a profile that `write_profile` wrote. Raises ProfileError."""
    name = f"cluster profile {path}"
    found = read_named_json(path, name, "make one with python -m moe_jax.measure", ProfileError)
    if isinstance(found, dict):
        found = {"memory_bytes": None, **found}  # earlier versions of the file lack it
    problem = _problem(found, _PROFILE)
    for i, each in enumerate([] if problem else found["curves"]):
        problem = problem or _in_curve(f"curves[{i}]", each)
    if problem:
        raise ProfileError(f"{name} is damaged ({problem}): make it again with python -m moe_jax.measure")
    return ClusterProfile(**{**found, "curves": tuple(map(_curve, found["curves"]))})


def _curve(found: dict[str, Any]) -> Curve:
    tuples: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return Curve(**tuples)


def _is_number(value: object, above: float = -1.0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > above


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value, above=0)


def _are_times(values: object) -> bool:
    return isinstance(values, list) and all(_is_number(value, above=0) for value in values)


def _are_amounts(values: object) -> bool:
    return isinstance(values, list) and _are_times(values) and len(values) >= 2 and values == sorted(set(values))


# The check of each field, and its description in error messages.
Rules = dict[str, tuple[Callable[[object], bool], str]]
_TEXT = (lambda value: isinstance(value, str), "text")
_COUNT = (_is_count, "a whole number above 0")
_OBJECT = (lambda value: isinstance(value, dict), "an object")
_TIMES = (_are_times, "a list of numbers above 0")
_NOT_NEGATIVE = (lambda value: _is_number(value) and value >= 0, "a number from 0 up")
_PROFILE: Rules = {
    "platform": (lambda value: value in ("tpu", "gpu", "cpu"), "tpu, gpu or cpu"),
    "devices": _COUNT,
    "processes": _COUNT,
    "node_devices": _COUNT,
    "curves": (lambda value: isinstance(value, list), "a list"),
    "provenance": _OBJECT,
    "memory_bytes": (lambda value: value is None or _is_count(value), "a whole number above 0, or null"),
}
_CURVE: Rules = {
    "name": _TEXT,
    "settings": (
        lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
        "an object of whole numbers above 0",
    ),
    "unit": (lambda value: value in ("bytes", "flops"), "bytes or flops"),
    "amounts": (_are_amounts, "a list of two or more growing numbers above 0"),
    "median_s": _TIMES,
    "first_quartile_s": _TIMES,
    "third_quartile_s": _TIMES,
    "alpha_s": _NOT_NEGATIVE,
    "beta_s": _NOT_NEGATIVE,
    "r_squared": (lambda value: _is_number(value, above=-math.inf), "a number"),
    "efficiency": _TIMES,
}
_COLLECTIVES = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter", "permute")
_LISTS = ("median_s", "first_quartile_s", "third_quartile_s", "efficiency")


def _problem(found: object, rules: Rules) -> str | None:
    """Describe what is wrong with an object, or return None."""
    if not isinstance(found, dict):
        return "it is no JSON object"
    if found.keys() != rules.keys():
        return f"it wants {', '.join(rules)}, and has {', '.join(map(str, found)) or 'nothing'}"
    return next((f"{name} is not {words}" for name, (holds, words) in rules.items() if not holds(found[name])), None)


def _in_curve(place: str, found: object) -> str | None:
    problem = _problem(found, _CURVE)
    if problem is None and isinstance(found, dict):
        uneven = [name for name in _LISTS if len(found[name]) != len(found["amounts"])]
        problem = f"{uneven[0]} is not as long as amounts" if uneven else None
        ranks = found["settings"].get("ranks", 0)
        if found["name"].startswith(_COLLECTIVES) and (ranks < 2 or "stride" not in found["settings"]):
            problem = "settings of a collective are 2 ranks or more, and a stride"
    return problem and f"{place}: {problem}"


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
