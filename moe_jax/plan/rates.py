"""The rates that training orders a step's tasks by: those of the devices, unless the config sets them."""

import dataclasses
from typing import Any

from moe_jax.config import Config, ScheduleConfig
from moe_jax.plan.clusters import PRESETS, Cluster, cluster_of, preset_of


def with_rates(schedule: ScheduleConfig, cluster: Cluster) -> ScheduleConfig:
    """The schedule section with the rates of a cluster, unless it has its own."""
    device, near, far = cluster.device, cluster.levels[0], cluster.levels[-1]
    rates = {
        "device_tflops": device.matrix_flops_per_s * device.matrix_efficiency / 1e12,
        "link_gb_per_s": 1e-9 / near.line.beta_s,
        "network_gb_per_s": 1e-9 / far.line.beta_s,
    }
    known: dict[str, Any] = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    return dataclasses.replace(
        schedule, **{name: rate for name, rate in known.items() if getattr(schedule, name) is None}
    )


def with_rates_of(config: Config, device_kind: str) -> Config:
    """The config with the published rates of GPUs of jax's kind and of their network. Others keep typical rates."""
    preset = preset_of(device_kind)
    if preset is None or PRESETS[preset].device.platform != "gpu":
        return config
    clusters = (cluster_of(device_kind, PRESETS[preset].unit * 2**power) for power in range(1, 8))
    cluster = next(each for each in clusters if len(each.levels) > 1)  # NVLink joins several trays of a rack
    return dataclasses.replace(config, schedule=with_rates(config.schedule, cluster))
