"""What a config leaves open: as the run's checkpoints have it, or planned for the devices at hand."""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import NamedTuple

import jax

from moe_jax.checkpoint.latest import agreed_newest
from moe_jax.config import Config
from moe_jax.config.draft import Draft, sections_of
from moe_jax.config.registry import OPEN_EXCHANGE
from moe_jax.config.validate import setting
from moe_jax.config.yaml_io import load_config
from moe_jax.distributed.processes import allgather
from moe_jax.errors import ConfigError, MeshError, UserError
from moe_jax.parallel.mesh import mesh_sizes
from moe_jax.plan.clusters import Cluster, cluster_of, find_cluster
from moe_jax.plan.planner import plan
from moe_jax.run.process_agreement import check_same_settings, shared_settings


class Chosen(NamedTuple):
    """A config without open settings."""

    config: Config
    facts: dict[str, str]  # what was chosen, in words


def resolve_auto(draft: Draft) -> Chosen:
    """Choose what is open, in every process the same. Raises UserError; writes nothing."""
    check_same_settings(draft)
    if not draft.open:
        return Chosen(draft.choose(), {})
    if draft.exchange.algorithm == OPEN_EXCHANGE:  # which a run without a plan has, too
        draft = dataclasses.replace(draft, open=draft.open | {"exchange.algorithm"})
    cluster = run_cluster(draft.plan.cluster)
    saved = _saved(draft)
    config = saved or plan(draft, cluster).config
    if len(set(allgather(zlib.crc32(json.dumps(shared_settings(config)).encode())))) > 1:
        raise ConfigError(
            f"{max(draft.open)}=auto became something else on other processes: give them the same config, "
            "plan.cluster and log.dir"
        )
    alone = ", whose simulated devices overlap nothing" if _simulates(cluster) else ""
    source = f"as in {draft.log.dir}" if saved else f"planned for {cluster.name}{alone}"
    told = " ".join(f"{name}={_text(setting(config, name))}" for name in sorted(draft.open))
    return Chosen(config, {"auto": f"{told}, {source}"})


def run_cluster(name: str | None) -> Cluster:
    """The devices of this run, as `plan.cluster` names them or as they tell. Raises ConfigError or ClusterError."""
    cluster = _named(name)
    return cluster.simulated() if _simulates(cluster) else cluster


def _simulates(cluster: Cluster) -> bool:
    """Whether devices of this run stand for those of the cluster, which are CPUs, too."""
    return jax.devices()[0].platform == cluster.device.platform == "cpu" and jax.local_device_count() > 1


def _named(name: str | None) -> Cluster:
    devices = jax.devices()
    if name is None:
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        return cluster_of(devices[0].device_kind, len(devices), slices)
    try:
        cluster = find_cluster(name)
    except UserError as error:
        raise ConfigError(f"plan.cluster={name}: {error}") from None
    if cluster.devices != len(devices):
        raise ConfigError(
            f"plan.cluster={name} has {cluster.devices} devices, and this run has {len(devices)}: "
            "name a cluster of as many, or use plan.cluster=null"
        )
    return cluster


def _saved(draft: Draft) -> Config | None:
    """With what the run's checkpoints were made with, if it is on the same mesh."""
    folder = Path(draft.log.dir)
    if agreed_newest(folder, {}) is None:
        return None
    try:
        saved = load_config(folder)
        config = draft.choose(**{name: vars(section) for name, section in sections_of(saved).items()})
        here, there = (mesh_sizes(each.mesh, jax.device_count()) for each in (config, saved))
    except (ConfigError, MeshError):
        return None
    return config if here == there else None


def _text(value: object) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
