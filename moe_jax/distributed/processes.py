"""Joining the processes of one run: on a cluster that jax detects, or at an address from the command line."""

import argparse
import json
import os
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from moe_jax.config.ranges import CLUSTER, check_number
from moe_jax.config.validate import nearest_multiples
from moe_jax.distributed.address import split_address
from moe_jax.distributed.cluster import TPU_ALONE, ClusterManager, NoClusterError, detect_cluster, place_on
from moe_jax.distributed.host_memory import keep_freed_memory
from moe_jax.distributed.hosts import publish_host
from moe_jax.distributed.startup_barrier import ProcessError, StartupBarrier, wait_for_all
from moe_jax.errors import ConfigError, UserError
from moe_jax.parallel.mesh import found_devices
from moe_jax.paths import shown

T = TypeVar("T")

JOIN_TIMEOUT_S = 300  # for all processes to join
_LONGEST_JOIN_S = 7 * 24 * 3600
HEARTBEAT_TIMEOUT_S = 30  # without a heartbeat, after which a process counts as dead
SHUTDOWN_TIMEOUT_S = 120  # for which the first process to finish waits for the last
THREADS_PER_DEVICE = 2  # XLA's threads per simulated device
BACKGROUND_THREADS_PER_DEVICE = 8  # more than the pieces of background exchanges that a step waits for concurrently
# XLA flags for simulated devices, unless the environment sets them
COLLECTIVE_TIMEOUT = {
    "--xla_cpu_collective_timeout_seconds": "600"
}  # for which a collective waits for other devices; by default, for ever
NO_UNROLLING = {
    "--xla_backend_extra_options": "xla_cpu_disable_loop_unrolling"
}  # programs are as fast, and compile faster
OLDER_EMITTERS = {"--xla_cpu_use_fusion_emitters": "false"} if jax.__version_info__ < (0, 11) else {}


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Options for finding the other processes of the run. Raises ProcessError for invalid ones."""

    mode: Literal["auto", "on", "off"] = "auto"  # auto: on if jax detects a cluster of more than one process
    coordinator: str | None = None  # host:port at which process 0 serves
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout_s: float = JOIN_TIMEOUT_S  # for all processes to join

    def __post_init__(self) -> None:
        if not 0 < self.join_timeout_s <= _LONGEST_JOIN_S:
            raise ProcessError(
                f"--join-timeout={self.join_timeout_s:g} must be above 0 and at most {_LONGEST_JOIN_S} seconds"
            )
        explicit = [self.coordinator, self.num_processes, self.process_id]
        if all(value is None for value in explicit):
            return
        if None in explicit:
            names = ("--coordinator", "--num-processes", "--process-id")
            values = [f"{name}={value}" for name, value in zip(names, explicit, strict=True) if value is not None]
            missing = [name for name, value in zip(names, explicit, strict=True) if value is None]
            raise ProcessError(f"{' '.join(values)} also needs {' and '.join(missing)}: give all three or none")
        if self.mode == "off":
            raise ProcessError(f"--coordinator={self.coordinator} contradicts --distributed=off: drop one of them")
        if split_address(self.coordinator or "") is None:
            raise ProcessError(
                f"--coordinator={self.coordinator} must be HOST:PORT with a port in 1..65535, e.g. 10.0.0.1:8476"
            )
        count, rank = self.num_processes or 0, self.process_id or 0
        check_number("--num-processes", count, CLUSTER)
        if not 0 <= rank < count:
            raise ProcessError(f"--process-id={rank} must be 0..{count - 1} with --num-processes={count}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `options_from` reads."""
    group = parser.add_argument_group("many processes")
    group.add_argument(
        "--distributed",
        choices=("auto", "on", "off"),
        default="auto",
        help="join the other processes of a cluster; auto: where SLURM, Open MPI, a TPU pod or Kubernetes is found",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, instead of finding a cluster")
    group.add_argument("--num-processes", type=int, metavar="N", help="processes in the run, with --coordinator")
    group.add_argument("--process-id", type=int, metavar="I", help="of this process, 0..N-1, with --coordinator")
    group.add_argument(
        "--join-timeout",
        type=float,
        default=JOIN_TIMEOUT_S,
        metavar="SECONDS",
        help="until all processes have come; then exit code 2 (default: %(default)s)",
    )


def options_from(arguments: argparse.Namespace) -> Processes:
    """Make the options from parsed flags. Raises ProcessError."""
    return Processes(
        mode=arguments.distributed,
        coordinator=arguments.coordinator,
        num_processes=arguments.num_processes,
        process_id=arguments.process_id,
        join_timeout_s=arguments.join_timeout,
    )


def initialize(
    options: Processes,
    cpu_devices: int | None,
    in_background: bool = True,
    quick_compile: bool = False,
) -> None:
    """Join the run, before jax computes anything; each process simulates its share of `cpu_devices`, unless None.

    `in_background` is whether steps may wait for background exchanges (of `exchange.algorithm` or `.reduction`);
    `quick_compile` is the setting of that name.

    Raises ProcessError if devices do not divide over the processes, or if other processes do not join in time.
    """
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
    cluster = None
    if options.mode != "off" and options.coordinator is None:
        cluster = detect_cluster(os.environ, tpu="tpu" in (jax.config.jax_platforms or ""))  # type: ignore[attr-defined]
    if options.mode == "on" and options.coordinator is None and cluster is None:
        raise ProcessError(
            "--distributed=on finds no SLURM, Open MPI, TPU pod or Kubernetes job here: "
            "pass --coordinator HOST:PORT --num-processes N --process-id I"
        )
    num_processes = cluster.num_processes if cluster else options.num_processes or 1
    if cpu_devices is not None:
        _simulate(cpu_devices, num_processes, cluster, in_background, quick_compile)
    if options.coordinator is not None:
        # by default, jax would listen on every interface
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", options.coordinator)
        _join(options.coordinator, num_processes or 1, options.process_id or 0, None, bind, options.join_timeout_s)
    elif cluster is not None and (options.mode == "on" or num_processes != 1):
        try:
            place = place_on(cluster, options.join_timeout_s)
        except NoClusterError as error:
            if options.mode == "on" or cluster != TPU_ALONE:
                raise
            print(f"this process runs alone ({error})")
        else:
            _join(*place, os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"), options.join_timeout_s)
    if not jax.distributed.is_initialized():  # with several processes, settings are compared first
        found_devices()
        if jax.process_count() > 1:  # a slice of TPUs knows its own hosts
            raise ProcessError(
                f"these devices are of {jax.process_count()} hosts, which did not find each other: pass --coordinator, "
                "--num-processes and --process-id"
            )


def is_main_process() -> bool:
    """Whether this is process 0, which writes the run's files. Call it after `initialize`: it starts jax's devices."""
    return jax.process_index() == 0


def allgather(number: int) -> list[int]:
    """Gather a number in 0..2³²-1 from each process; all of them call it, and wait for each other."""
    if jax.process_count() == 1:
        return [number]
    return multihost_utils.process_allgather(np.array(number, np.uint32)).tolist()


def allgather_rows(numbers: NDArray[Any]) -> NDArray[Any]:
    """Gather an array from each process, all of one shape, as the rows of an array; all of them call it."""
    if jax.process_count() == 1:
        return numbers[None]
    return np.asarray(multihost_utils.process_allgather(numbers))


def largest(number: float) -> float:
    """Return the largest of the processes' numbers; all of them call it."""
    if jax.process_count() == 1:
        return number
    return float(multihost_utils.process_allgather(np.array(number, np.float32)).max())


def from_process(source: int, value: Any) -> Any:
    """Broadcast the value of process `source`, which must fit in JSON; all processes call it."""
    text = json.dumps(value).encode()
    if jax.process_count() == 1:
        return json.loads(text)
    length = allgather(len(text))[source]
    own = np.frombuffer(text.ljust(length)[:length], np.uint8)
    sent = multihost_utils.broadcast_one_to_all(own, is_source=jax.process_index() == source)
    return json.loads(np.asarray(sent, np.uint8).tobytes())


def first_problem(own: str) -> str:
    """Return what prevents this process from going on, or else "process 3: …" for what the first of those that have a
    problem reports; "" if none has one. All processes call it.
    """
    have = allgather(bool(own))
    if not any(have):
        return ""
    first = have.index(1)
    told = from_process(first, shown(own))  # with URLs in place of its copies of these
    return own or f"process {first}: {told}"


def main_first(action: Callable[[], T]) -> T:
    """Return `action()`, which process 0 finishes before the others begin; all of them call it.

    If it raises a UserError on process 0, it is raised when the others begin, so that none waits for it.
    """
    error = found = None
    if is_main_process():
        try:
            found = action()
        except UserError as problem:
            error = problem
    allgather(0)  # a barrier
    if error:
        raise error
    return found if found is not None else action()


def read_alike(read: Callable[[], T], name: str) -> T:
    """Return `read()`, which must be the same on all processes; all of them call it. `name` is for messages.

    Raises ConfigError if it differs, and the ConfigError of `read`.
    """
    error = found = None
    try:
        found = read()
    except ConfigError as problem:
        error = problem  # raised only once the others know that this process has no value
    content = allgather(0 if error else zlib.crc32(repr(found).encode()) | 1)
    if error:
        raise error
    if len(set(content)) > 1:
        raise ConfigError(f"{name} is not the same on all processes: give them copies of one file")
    return typing.cast(T, found)


def _join(coordinator: str, count: int, rank: int, local_devices: Any, bind: str | None, timeout_s: float) -> None:
    wait_for_all(
        StartupBarrier(address=coordinator, bind=bind, num_processes=count, process_id=rank, timeout_s=timeout_s)
    )
    jax.distributed.initialize(
        coordinator,
        count,
        rank,
        local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(60, round(timeout_s)),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        coordinator_bind_address=bind,
    )
    publish_host()


def _simulate(
    cpu_devices: int,
    num_processes: int | None,
    cluster: ClusterManager | None,
    in_background: bool,
    quick_compile: bool,
) -> None:
    if num_processes is None:
        raise ProcessError(
            f"mesh.cpu_devices={cpu_devices} is to be divided over an unknown number of {cluster and cluster.name} "
            "processes: pass --coordinator HOST:PORT --num-processes N --process-id I, or --distributed=off"
        )
    if cpu_devices % num_processes:
        raise ProcessError(
            f"mesh.cpu_devices={cpu_devices} is not divisible by {num_processes} processes "
            f"(each simulates an equal share): set mesh.cpu_devices={nearest_multiples(cpu_devices, num_processes)}"
        )
    flags = NO_UNROLLING | (OLDER_EMITTERS if quick_compile else {})
    _set_xla_flags(flags | (COLLECTIVE_TIMEOUT if num_processes > 1 else {}))
    share = cpu_devices // num_processes
    if share > 1:  # devices share XLA's thread pool, in which waits block threads; more than needed cost time
        threads = BACKGROUND_THREADS_PER_DEVICE if in_background else THREADS_PER_DEVICE
        os.environ.setdefault("PJRT_NPROC", str(threads * share))
    keep_freed_memory()
    try:
        jax.config.update("jax_num_cpu_devices", share)  # overrides XLA's --xla_force_host_platform_device_count
    except RuntimeError:  # jax has its devices already, as in a notebook that trains twice
        devices = jax.local_devices()
        if (len(devices), devices[0].platform) != (share, "cpu"):
            raise ProcessError(
                f"mesh.cpu_devices={cpu_devices} comes too late, jax already runs with {len(devices)} "
                f"{devices[0].platform} devices here: restart Python, or set mesh.cpu_devices=null"
            ) from None


def _set_xla_flags(flags: Mapping[str, str]) -> None:
    """Add flags to XLA_FLAGS, except those that it already has."""
    present = os.environ.get("XLA_FLAGS", "")
    own = [f"{name}={value}" for name, value in flags.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join([*present.split(), *own])
