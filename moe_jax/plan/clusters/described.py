"""A cluster that a YAML file describes: devices and levels of links, from scratch or based on a preset.

base: h100                    # take the device of a preset, or describe one under device
devices: 512
ranks_per_adapter: 2          # neighbours that share a network adapter (1)
device: {memory_gb: 80, tflops: 989, memory_gb_per_s: 3350, matrix_efficiency: 0.75, watts: 700, dollars_per_hour: 2.5}
levels:                       # from the links inside a node outwards; the last one joins all devices
  - {name: NVLink, devices: 8, gb_per_s: 450, efficiency: 0.8, alpha_us: 15}
  - {name: rail, devices: 64, gb_per_s: 50, efficiency: 0.85, alpha_us: 50}
  - name: spine
    devices: 512
    gb_per_s: 25
    rates:                    # of devices in a row, relative to gb_per_s; left out: all links are alike
      - {devices: 504}
      - {devices: 8, send: 0.5, receive: 0.25}
speeds:                       # of devices in a row, relative to device; left out: all are as fast
  - {devices: 384}
  - {devices: 128, speed: 0.5}

Rates are 10⁹ bytes per second out of one device, in one direction; a device's own share of what several share.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_jax.config.yaml_reader import parse_yaml
from moe_jax.errors import UserError
from moe_jax.files.atomic import reason
from moe_jax.files.untrusted import read_text
from moe_jax.plan.clusters.hardware import Cluster, Device, Level, LinkCurve, LinkRates, Preset

_MOST_BYTES = 2**16
_MOST_DEVICES = 2**20
_MOST_LEVELS = 16
_SMALLEST, _LARGEST = 1e-6, 1e9  # a number in a file, in its unit
_MOST_SPEEDS = 2**10
_KEYS = ("base", "devices", "ranks_per_adapter", "device", "levels", "speeds")
_DEVICE_KEYS = {  # and the factor to the units of Device
    "memory_gb": ("memory_bytes", 1e9),
    "tflops": ("matrix_flops_per_s", 1e12),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "matrix_efficiency": ("matrix_efficiency", 1.0),
    "watts": ("watts", 1.0),
    "dollars_per_hour": ("dollars_per_hour", 1.0),
}
_NEEDED = ("memory_gb", "tflops", "memory_gb_per_s")
_LEVEL_KEYS = ("name", "devices", "gb_per_s", "efficiency", "alpha_us", "rates")
_RATE_KEYS = LinkRates._fields
_SPEED_KEYS = ("devices", "speed")
_SHARES = ("efficiency", "matrix_efficiency", "speed", "send", "receive")
_EFFICIENCY, _MATRIX_EFFICIENCY, _ALPHA_US = 0.8, 0.75, 20.0  # unless the file gives them


class ClusterFileError(UserError):
    """A cluster file that is missing, or that describes no possible cluster."""


def described_cluster(path: Path, presets: Mapping[str, Preset]) -> Cluster:
    """The cluster of a YAML file. Raises ClusterFileError, and ConfigError for invalid YAML."""
    try:
        found = parse_yaml(read_text(path, _MOST_BYTES), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClusterFileError(f"cluster file {path} cannot be read ({why}): name a YAML file") from None
    return _Reader(path, presets).cluster(found)


class _Reader:
    """Checks of a file's values, whose errors name the file, the key, its value and a cure."""

    def __init__(self, path: Path, presets: Mapping[str, Preset]):
        self._path, self._presets = path, presets

    def cluster(self, found: Any) -> Cluster:
        found = self._section("the file", found, _KEYS)
        devices = self._count("devices", found.get("devices"))
        levels = found.get("levels")
        if not isinstance(levels, list) or not 0 < len(levels) <= _MOST_LEVELS:
            raise self._error(f"levels must be a list of 1 to {_MOST_LEVELS} sections with {', '.join(_LEVEL_KEYS)}")
        joined = tuple(self._level(f"levels[{number}]", each, devices) for number, each in enumerate(levels))
        for before, level in pairwise(joined):
            if level.devices <= before.devices or level.devices % before.devices:
                raise self._error(
                    f"{level.name} joins {level.devices} devices, and {before.name} {before.devices}: "
                    f"use a multiple of {before.devices}, e.g. {2 * before.devices}"
                )
        if joined[-1].devices != devices:
            raise self._error(f"{joined[-1].name} joins {joined[-1].devices} of devices={devices}: use {devices}")
        sharing = self._number("ranks_per_adapter", found.get("ranks_per_adapter", 1))
        if sharing < 1:
            raise self._error(f"ranks_per_adapter={sharing:g} must be at least 1, which shares no adapter")
        return Cluster(
            name=str(self._path),
            device=self._device(found),
            devices=devices,
            levels=joined,
            ranks_per_adapter=sharing,
            speeds=self._speeds(found.get("speeds"), devices),
        )

    def _speeds(self, found: Any, devices: int) -> tuple[tuple[int, float], ...]:
        return tuple(
            (count, self._number(f"{place}.speed", section.get("speed", 1.0)))
            for place, count, section in self._in_a_row("speeds", found, _SPEED_KEYS, devices)
        )

    def _rates(self, name: str, found: Any, devices: int) -> tuple[LinkRates, ...]:
        return tuple(
            LinkRates(count, *(self._number(f"{place}.{way}", section.get(way, 1.0)) for way in _RATE_KEYS[1:]))
            for place, count, section in self._in_a_row(name, found, _RATE_KEYS, devices)
        )

    def _in_a_row(
        self, name: str, found: Any, keys: Collection[str], devices: int
    ) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        """The place, the number of devices and the section of each entry of a list for all devices, if it is given."""
        if found is None:
            return
        if not isinstance(found, list) or not 0 < len(found) <= _MOST_SPEEDS:
            raise self._error(f"{name} must be a list of 1 to {_MOST_SPEEDS:,} sections with {', '.join(keys)}")
        total = 0
        for number, each in enumerate(found):
            place = f"{name}[{number}]"
            section = self._section(place, each, keys)
            count = self._count(f"{place}.devices", section.get("devices"))
            total += count
            yield place, count, section
        if total != devices:
            kind = name.rpartition(".")[2]
            raise self._error(f"{name} are of {total} devices, and devices={devices}: give the {kind} of all {devices}")

    def _device(self, found: Mapping[str, Any]) -> Device:
        own = found.get("device")
        own = self._section("device", {} if own is None else own, tuple(_DEVICE_KEYS))
        values = {key: self._number(f"device.{key}", value) for key, value in own.items()}
        changed: dict[str, Any] = {_DEVICE_KEYS[key][0]: _DEVICE_KEYS[key][1] * values[key] for key in values}
        if "memory_bytes" in changed:
            changed["memory_bytes"] = int(changed["memory_bytes"])
        if (base := found.get("base")) is not None:
            if not isinstance(base, str) or base not in self._presets:
                raise self._error(f"base={base} is not a preset: use one of {', '.join(self._presets)}")
            return replace(self._presets[base].device, **changed)
        if missing := [key for key in _NEEDED if key not in values]:
            raise self._error(f"device has no {missing[0]}: give it, or base with a preset, e.g. base: h100")
        defaults = {"matrix_efficiency": _MATRIX_EFFICIENCY, "watts": None, "dollars_per_hour": None}
        return Device(name=self._path.stem, platform="gpu", **(defaults | changed))

    def _level(self, place: str, found: Any, devices: int) -> Level:
        found = self._section(place, found, _LEVEL_KEYS)
        rate = self._number(f"{place}.gb_per_s", found.get("gb_per_s"))
        efficiency = self._number(f"{place}.efficiency", found.get("efficiency", _EFFICIENCY))
        alpha_s = 1e-6 * self._number(f"{place}.alpha_us", found.get("alpha_us", _ALPHA_US))
        level_name = found.get("name", place)
        if not isinstance(level_name, str) or not level_name:
            raise self._error(f"{place}.name={level_name} must be a text, e.g. NVLink")
        level = Level(
            name=level_name,
            devices=self._count(f"{place}.devices", found.get("devices")),
            bytes_per_s=1e9 * rate,
            ring=LinkCurve(alpha_s, efficiency),
            rates=self._rates(f"{place}.rates", found.get("rates"), devices),
        )
        return replace(level, bytes_per_s=level.bytes_per_s * level.slowest)

    def _section(self, place: str, found: Any, keys: Collection[str]) -> Mapping[str, Any]:
        if not isinstance(found, dict):
            raise self._error(f"{place} must be a section with {', '.join(keys)}")
        for key in found:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1)
                cure = f"did you mean {near[0]}?" if near else f"use {', '.join(keys)}"
                raise self._error(f"{place} has {key}: {cure}")
        return found

    def _count(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_DEVICES:
            raise self._error(f"{name}={value} must be a whole number from 1 to {_MOST_DEVICES:,}")
        return value

    def _number(self, name: str, value: Any) -> float:
        most = 1.0 if name.endswith(_SHARES) else _LARGEST
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most:
            raise self._error(f"{name}={value} must be a number above 0 and up to {most:g}")
        if value < _SMALLEST:
            raise self._error(f"{name}={value} must be at least {_SMALLEST:g}")
        return float(value)

    def _error(self, problem: str) -> ClusterFileError:
        return ClusterFileError(f"cluster file {self._path}: {problem}")
