"""Clusters by name: presets of any size (`h100x64`, `v5p-6144`, `4xv5e-256`), or the file of a measured profile."""

import difflib
import re

from moe_jax.errors import UserError
from moe_jax.files.places import parse_place
from moe_jax.plan.clusters.cpu import CPUS
from moe_jax.plan.clusters.described import described_cluster
from moe_jax.plan.clusters.gpu import GPUS
from moe_jax.plan.clusters.hardware import Cluster, Device, Level, LinkCurve, Preset
from moe_jax.plan.clusters.measured import measured_cluster
from moe_jax.plan.clusters.tpu import TPUS

__all__ = [
    "PRESETS",
    "Cluster",
    "ClusterError",
    "Device",
    "Level",
    "LinkCurve",
    "cluster_of",
    "find_cluster",
    "preset_of",
]

PRESETS = {**TPUS, **GPUS, **CPUS}

MOST_DEVICES = 2**20
_MAX_DIGITS = 20  # of a number; Python parses up to 4,300

# Patterns of jax's device kinds, and their presets. The first pattern that matches is used.
_KINDS = {
    **{"v5 lite|v5e": "v5e", "v6 lite|v6e": "v6e", "tpu v5": "v5p", "tpu v4": "v4", "tpu7x": "tpu7x"},
    **{"a100.*80gb": "a100", "h100": "h100", "h200": "h200", "gb200": "gb200", "gb300": "gb300"},
    **{"b200": "b200", "mi250x": "mi250x", "mi300x": "mi300x", "a800": "a800", "h800": "h800", "v100": "v100"},
    **{"rtx 3090": "rtx3090", "rtx 2080 ti": "rtx2080ti", "^cpu$": "cpu"},
}


class ClusterError(UserError):
    """A cluster that is unknown, or that is not available in this size."""


def find_cluster(name: str) -> Cluster:
    """A preset with a number of devices, or the cluster of a file: a measured profile (.json) or a description (.yaml).

    Raises ClusterError, ProfileError or ClusterFileError.

    `4xv5e-256` is four slices. A number of devices beyond the largest slice is split into as few slices as possible.
    """
    if name.endswith(".json"):
        return measured_cluster(parse_place("the cluster", name))
    if name.endswith((".yaml", ".yml")):
        return described_cluster(parse_place("the cluster", name), PRESETS)
    parts = None if name in PRESETS else re.fullmatch(r"(?:(\d+)x)?(.+?)(?:[x-](\d+))?", name, re.ASCII)
    slices, kind, size = parts.groups() if parts else (None, name, None)
    if kind not in PRESETS and f"{kind}x" in PRESETS and size is not None:  # mi300x8
        kind = f"{kind}x"
    if kind not in PRESETS:
        near = difflib.get_close_matches(kind.lower(), PRESETS, n=1)
        others = (
            f"use one of {', '.join(PRESETS)}, as in h100x64, the .json file of a measured profile, or a .yaml file "
            "that describes one (docs/plan.md)"
        )
        cure = f"did you mean {near[0]}-{size or 64}?" if near else others
        raise ClusterError(f"cluster {name!r} is unknown: {cure}")
    if size is None:
        raise ClusterError(
            f"cluster {name} does not say how many devices: add a number, as in {name}-{8 * PRESETS[kind].unit}"
        )
    if max(len(size), len(slices or "")) > _MAX_DIGITS or int(slices or 1) * int(size) > MOST_DEVICES:
        raise ClusterError(f"cluster {name} has too many devices: use up to {MOST_DEVICES:,}")
    return _of(name, PRESETS[kind], int(size), None if slices is None else int(slices))


def preset_of(device_kind: str) -> str | None:
    """The name of the preset for jax's device kind; None if it is unknown."""
    return next((preset for pattern, preset in _KINDS.items() if re.search(pattern, device_kind.lower())), None)


def cluster_of(device_kind: str, count: int, slices: int = 1) -> Cluster:
    """The cluster of `count` devices of jax's device kind, in this many slices. Raises ClusterError."""
    preset = preset_of(device_kind)
    if preset is None:
        raise ClusterError(
            f"plan.cluster=null, and nothing is known of {device_kind}: name a preset ({', '.join(PRESETS)}, as in "
            "h100x64), or a profile that python -m moe_jax.measure wrote"
        )
    return find_cluster(f"{slices}x{preset}-{count // slices}" if slices > 1 else f"{preset}x{count}")


def _of(name: str, preset: Preset, count: int, slices: int | None) -> Cluster:
    if count == 0 or slices == 0:
        raise ClusterError(f"cluster {name} has no devices: use 1 or more")
    if count > preset.unit and count % preset.unit:
        lower = count // preset.unit * preset.unit
        raise ClusterError(
            f"cluster {name}: {count} devices are no whole {preset.unit_name}s of {preset.unit}: "
            f"use {lower} or {lower + preset.unit}"
        )
    largest = preset.largest_slice
    if largest is None:
        if slices is not None:
            raise ClusterError(
                f"cluster {name}: {preset.device.name}s come in nodes, not in slices: leave out {slices}x"
            )
        devices, per_slice = count, min(count, preset.unit)
    elif slices is not None:
        if count > largest:
            raise ClusterError(
                f"cluster {name}: the largest slice has {largest} devices: use up to that, and more slices"
            )
        devices, per_slice = slices * count, count
    else:
        needed = -(-count // largest)
        if count % (needed * preset.unit if needed > 1 else 1):
            raise ClusterError(
                f"cluster {name}: {count} devices are no {needed} equal slices of at most {largest}: "
                f"use {needed * largest}, or say which, as in {needed}x{name.rstrip('0123456789')}{largest}"
            )
        devices, per_slice = count, count // needed
    if preset.torus is not None:
        _check_slice(name, preset.device.name, per_slice, preset.torus, count // per_slice)
    return Cluster(
        name=name,
        device=preset.device.slowest_of(devices, preset.variation),
        devices=devices,
        levels=preset.levels(devices, per_slice),
        ranks_per_adapter=max(preset.unit / preset.adapters_per_unit, 1.0) if preset.adapters_per_unit else 1.0,
    )


def _check_slice(name: str, device: str, devices: int, torus: int, slices: int) -> None:
    """Raise ClusterError for a slice size that does not exist; the name's number counts `slices` of them."""
    smaller = [2**power for power in range(torus.bit_length() - 1)]
    if devices in smaller or devices % torus == 0:
        return
    lower = devices // torus * torus or max(each for each in smaller if each < devices)
    upper = min(2 * lower, lower + torus)
    raise ClusterError(
        f"cluster {name}: slices of {device} have {', '.join(map(str, smaller))} or a multiple of {torus} devices: "
        f"use {slices * lower} or {slices * upper}"
    )
