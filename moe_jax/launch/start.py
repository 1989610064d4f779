"""The settings of a launch, and the start of one worker: the same on every host of a run."""

import hmac
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.errors import UserError
from moe_jax.launch.events import Events
from moe_jax.launch.places import settings_of_fewer
from moe_jax.launch.worker import Worker
from moe_jax.run.run_lock import LAUNCH

TRAINING = "moe_jax.train"  # a module
TOKEN = "MOE_JAX_TOKEN"  # environment variable with the secret that the hosts of a run share


class LaunchError(UserError):
    """The processes cannot be started."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of a launch: the command, its processes and hosts, and timeouts."""

    module: str
    command: Sequence[str]  # arguments of the module
    processes: int  # per host
    min_processes: int  # on all hosts together, below which the run does not continue
    port: int | None  # of the coordinator on a single host; None: a free one
    grace_s: float
    retries: int
    progress_timeout_s: float
    start_timeout_s: float
    hosts: int
    host: int  # number of this host
    min_hosts: int  # below which the run does not continue
    rendezvous: tuple[str, int]  # address of host 0 and first port; unused with one host
    host_timeout_s: float  # for which missing hosts are waited for
    token: bytes  # the secret that hosts share; empty with one host


class WorkerShare(NamedTuple):
    """One worker's part in a generation."""

    rank: int
    place: int  # see places.py
    processes: int  # of the generation
    coordinator: str  # host:port of rank 0
    again: bool  # after another generation, from the checkpoints of which it resumes


@contextmanager
def worker_environ(launch: Launch) -> Iterator[dict[str, str]]:
    """Make the environment of workers, with a folder that caches compiled programs for later generations.

    It has an ID of the launch, which is the same on all hosts and after restarts of launchers, but not the secret.
    """
    with tempfile.TemporaryDirectory(prefix="moe_jax_programs_") as programs:
        environ = {PROGRAMS: programs, **os.environ}
        environ.pop("JAX_COORDINATOR_BIND_ADDRESS", None)  # it is for another address
        environ.pop(TOKEN, None)
        if launch.hosts > 1:
            address = f"{launch.rendezvous[0]} {launch.rendezvous[1]}".encode()
            environ[LAUNCH] = hmac.digest(launch.token, address, "sha256").hex()[:16]
        yield environ


def start(launch: Launch, share: WorkerShare, environ: Mapping[str, str], events: Events) -> Worker:
    """Start a worker on this host."""
    fewer = settings_of_fewer(launch.command, share.processes, launch.hosts * launch.processes)
    joining = ["--coordinator", share.coordinator, "--num-processes", str(share.processes)]
    resume = ["checkpoint.resume=true"] if share.again and launch.module == TRAINING else []
    command = [*launch.command, *fewer, *resume, *joining, "--process-id", str(share.rank)]
    # of several processes, each has one GPU; of one, all
    own = {"JAX_LOCAL_DEVICE_IDS": str(share.place % launch.processes)} if launch.processes > 1 else {}
    return Worker(share.rank, [sys.executable, "-m", launch.module, *command], {**own, **environ}, events)
