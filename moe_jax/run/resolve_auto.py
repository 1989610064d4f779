"""Values for the `auto` settings of a config: from the run's checkpoints, or planned for the devices of this run."""

import dataclasses
import json
import zlib
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
from moe_jax.files.local_copy import local_path
from moe_jax.parallel.mesh import mesh_sizes
from moe_jax.plan.clusters import Cluster, cluster_of, find_cluster
from moe_jax.plan.planner import plan
from moe_jax.run.process_agreement import check_same_settings, shared_settings


class ResolvedConfig(NamedTuple):
    """A config in which no setting is `auto`."""

    config: Config
    facts: dict[str, str]  # the choices as text, to be printed


def resolve_auto(draft: Draft) -> ResolvedConfig:
    """Choose values for all `auto` settings, the same in every process. Raises UserError; writes nothing."""
    check_same_settings(draft)
    if not draft.open:
        return ResolvedConfig(draft.choose(), {})
    if draft.exchange.algorithm == OPEN_EXCHANGE:  # this setting may be auto without a plan
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
    choices = " ".join(f"{name}={_text(setting(config, name))}" for name in sorted(draft.open))
    return ResolvedConfig(config, {"auto": f"{choices}, {source}"})


def run_cluster(name: str | None) -> Cluster:
    """The cluster of this run: the one that `plan.cluster` names, or one that matches its devices.

    Raises ConfigError or ClusterError.
    """
    cluster = _named(name)
    return cluster.simulated() if _simulates(cluster) else cluster


def _simulates(cluster: Cluster) -> bool:
    """Whether the devices of this run are simulated ones, and the cluster has CPUs, too."""
    return jax.devices()[0].platform == cluster.device.platform == "cpu" and jax.local_device_count() > 1


def _named(name: str | None) -> Cluster:
    """The cluster with this name, or one that matches the devices if None. Raises ConfigError or ClusterError."""
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
    """The draft completed with the settings of the run's checkpoints; None if there are none, or on another mesh."""
    folder = local_path(draft.log.dir)
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
