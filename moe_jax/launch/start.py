"""What is started, and how one worker of it is: the same on every host of a run."""

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
    """Processes that cannot be started."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started, and how patiently."""

    module: str
    command: Sequence[str]  # arguments of the module
    processes: int  # of each host
    min_processes: int  # of all hosts together, that may go on without the others
    port: int | None  # of one host; None: a free one
    grace_s: float
    retries: int
    progress_timeout_s: float
    start_timeout_s: float
    hosts: int
    host: int  # this one
    min_hosts: int  # that may go on without the others
    rendezvous: tuple[str, int]  # address of host 0 and first port; without a meaning for one host
    host_timeout_s: float  # that missing hosts are waited for
    token: bytes  # the secret of several hosts


class WorkerShare(NamedTuple):
    """One worker's part in a generation."""

    rank: int
    place: int
    processes: int  # of the generation
    coordinator: str  # host:port of rank 0
    again: bool  # behind another generation, from whose checkpoints it goes on


@contextmanager
def worker_environ(launch: Launch) -> Iterator[dict[str, str]]:
    """The environment of workers, with a folder that keeps compiled programs from generation to generation.

    It names the launch, the same on all hosts and after any of them has started again, and not its secret.
    """
    with tempfile.TemporaryDirectory(prefix="moe_jax_programs_") as programs:
        environ = {PROGRAMS: programs, **os.environ}
        environ.pop("JAX_COORDINATOR_BIND_ADDRESS", None)  # of another address than ours
        environ.pop(TOKEN, None)
        if launch.hosts > 1:
            meeting = f"{launch.rendezvous[0]} {launch.rendezvous[1]}".encode()
            environ[LAUNCH] = hmac.digest(launch.token, meeting, "sha256").hex()[:16]
        yield environ


def start(launch: Launch, part: WorkerShare, environ: Mapping[str, str], events: Events) -> Worker:
    """Start a worker on this host."""
    fewer = settings_of_fewer(launch.command, part.processes, launch.hosts * launch.processes)
    meeting = ["--coordinator", part.coordinator, "--num-processes", str(part.processes)]
    resume = ["checkpoint.resume=true"] if part.again and launch.module == TRAINING else []
    command = [*launch.command, *fewer, *resume, *meeting, "--process-id", str(part.rank)]
    on_gpus = {"JAX_LOCAL_DEVICE_IDS": str(part.place % launch.processes), **environ}  # one for each process
    return Worker(part.rank, [sys.executable, "-m", launch.module, *command], on_gpus, events)
