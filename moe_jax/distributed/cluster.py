"""Clusters that jax can join: what the environment says of a run's processes, and of this one among them."""

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax._src import clusters  # what jax detects of a cluster has no public interface

from moe_jax.config.ranges import CLUSTER
from moe_jax.distributed.address import split_address
from moe_jax.distributed.startup_barrier import ProcessError

# the variables from which jax reads the number of this process, among all and on its host
_RANKS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "SLURM": ("SLURM_PROCID", "SLURM_LOCALID"),
}
# the variables that say how many processes are on this host
_PROCESSES_HERE = {"Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM": "SLURM_STEP_TASKS_PER_NODE"}


class NoClusterError(ProcessError):
    """Nothing here knows of other processes."""


class ClusterManager(NamedTuple):
    """A kind of cluster that jax can join."""

    name: str
    num_processes: int | None  # None: unknown until jax asks the cluster


TPU_ALONE = ClusterManager("TPU", None)  # or with others, of which the metadata server knows


class Place(NamedTuple):
    """What a process needs to join the others."""

    coordinator: str  # host:port of process 0
    num_processes: int
    process_id: int
    local_devices: Sequence[int] | None  # None: all


def detect_cluster(environ: Mapping[str, str], tpu: bool) -> ClusterManager | None:
    """Detect the cluster that jax would join, in jax's order, but without network requests.

    `tpu` is whether jax will use TPUs. jax itself would ask the metadata server or the Kubernetes API even if there is
    only one process. Raises ProcessError if a variable has no valid number of processes.
    """
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return ClusterManager("Open MPI", _count(environ, "OMPI_COMM_WORLD_SIZE"))
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if all(name in environ for name in slurm):
        return ClusterManager("SLURM", _count(environ, "SLURM_NTASKS"))
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES"))
    if tpu and hosts is not None:
        slices = _count(environ, "MEGASCALE_NUM_SLICES") if environ.get("MEGASCALE_NUM_SLICES") else 1
        return ClusterManager("TPU", len(hosts.split(",")) * slices)
    if tpu and "TPU_SKIP_MDS_QUERY" not in environ:  # jax sets it if there is no TPU chip
        return TPU_ALONE
    # Every pod has the first variable; only those of an indexed job have peers.
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys() and importlib.util.find_spec("kubernetes"):
        return ClusterManager("Kubernetes", None)
    return None


def place_on(cluster: ClusterManager, timeout_s: float) -> Place:
    """Return this process's place on a cluster, as jax detects it. Raises ProcessError."""
    _check_ranks(os.environ, cluster)
    own_devices = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    try:
        coordinator, count, rank, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"),
            None,
            None,
            [int(text) for text in own_devices.split(",")] if own_devices else None,
            None,
            round(timeout_s),
        )
    except OSError as error:  # no metadata server, which jax asks on TPUs
        raise NoClusterError(
            f"--distributed: jax cannot ask for the hosts of {cluster.name} ({type(error).__name__}): pass "
            "--coordinator, --num-processes and --process-id"
        ) from None
    except (KeyError, ValueError, RuntimeError) as error:
        raise ProcessError(
            f"jax cannot read the variables of {cluster.name} or JAX_LOCAL_DEVICE_IDS={own_devices or ''} in the "
            f"environment ({type(error).__name__}: {error}): pass --coordinator, --num-processes and --process-id, or "
            "use --distributed=off for a single process"
        ) from error
    if coordinator is None or count is None or rank is None:
        raise NoClusterError(
            "--distributed: jax finds no coordinator here: pass --coordinator, --num-processes and --process-id"
        )
    if split_address(coordinator) is None:
        raise ProcessError(
            f"the environment gives {coordinator} as the coordinator, which must be HOST:PORT: set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT, or pass --coordinator, --num-processes and --process-id"
        )
    if own_devices is None and _has_all_devices(os.environ, cluster):
        devices = None
    return Place(coordinator, count, rank, devices)


def _has_all_devices(environ: Mapping[str, str], cluster: ClusterManager) -> bool:
    """Whether this process uses all GPUs that it sees: no other one is on its host, or it sees only one.

    jax gives each process the GPU of its number on the host.
    """
    here = environ.get(_PROCESSES_HERE.get(cluster.name, ""), "")
    if cluster.name == "SLURM":  # e.g. 8(x2),4: of each node
        here = _of_node(here, environ.get("SLURM_NODEID", ""))
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return here == "1" or (visible != "" and "," not in visible)


def _of_node(counts: str, node: str) -> str:
    """Return the number of a node from SLURM's list of them all, which counts equal ones in brackets; empty if none."""
    each = [count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    return each[int(node)] if node.isdecimal() and int(node) < len(each) else ""


def _integer(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable, or -1 if it has none."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _count(environ: Mapping[str, str], name: str) -> int:
    """Return the number of processes in a variable. Raises ProcessError."""
    count = _integer(environ, name)
    if not CLUSTER.least <= count <= CLUSTER.most:
        raise _invalid(environ, name, f"a number of processes in {CLUSTER.least}..{CLUSTER.most}")
    return count


def _invalid(environ: Mapping[str, str], name: str, expected: str) -> ProcessError:
    return ProcessError(
        f"the environment variable {name}={environ.get(name, '')} must be {expected}: start with the cluster's own "
        "command (srun, mpirun), which sets it, or use --distributed=off for a single process"
    )


def _check_ranks(environ: Mapping[str, str], cluster: ClusterManager) -> None:
    """Raise ProcessError if a variable from which jax reads the number of this process has no valid number."""
    for name in _RANKS.get(cluster.name, ()):
        count = cluster.num_processes or 0  # known wherever there are such variables
        if not 0 <= _integer(environ, name) < count:
            raise _invalid(environ, name, f"a number in 0..{count - 1}")
