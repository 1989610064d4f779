"""The hosts of a run, from the command line, the environment, and SLURM."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from moe_jax.config.ranges import CLUSTER, Range, check_number
from moe_jax.distributed.address import split_address
from moe_jax.launch.start import TOKEN, LaunchError
from moe_jax.launch.supervisor import PORTS

_MIN_TOKEN = 16  # characters
LONGEST_S = 10**7  # the longest timeout: four months
_SLURM = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID")  # set in tasks, but not in sbatch's shell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `hosts_from` reads."""
    group = parser.add_argument_group("several hosts")
    group.add_argument("--hosts", type=int, metavar="N", help="of the run, each with a launcher; None: SLURM's, or 1")
    group.add_argument("--host", type=int, metavar="I", help="this one, 0..N-1; None: SLURM's number of it")
    group.add_argument("--rendezvous", metavar="HOST:PORT", help="address of host 0, where all launchers meet")
    group.add_argument("--min-hosts", type=int, metavar="N", help="continue with so many if others are lost; None: all")
    group.add_argument(
        "--host-timeout", type=float, default=600, metavar="SECONDS", help="that missing hosts are waited for"
    )


def hosts_from(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings of a Launch about hosts, from parsed flags. Raises LaunchError."""
    hosts, host = arguments.hosts, arguments.host
    if hosts is None and all(name in environ for name in _SLURM):
        hosts, tasks, node = (int(environ[name]) for name in _SLURM)
        if tasks not in (1, hosts):
            raise LaunchError(
                f"srun started {tasks} tasks on {hosts} nodes: start one launcher on each, with srun "
                "--ntasks-per-node=1, and --processes for those of a node"
            )
        hosts, host = tasks, node if tasks > 1 and host is None else host
    hosts = 1 if hosts is None else hosts
    check_number("--hosts", hosts, CLUSTER)
    if host is None and hosts > 1:
        raise LaunchError(f"--hosts={hosts} also needs --host, this one's number in 0..{hosts - 1}")
    host = host or 0
    if not 0 <= host < hosts:
        raise LaunchError(f"--host={host} must be 0..{hosts - 1} with --hosts={hosts}")
    least = hosts if arguments.min_hosts is None else arguments.min_hosts
    if not 1 <= least <= hosts:
        raise LaunchError(f"--min-hosts={least} must be 1..{hosts} (--hosts)")
    check_number("--host-timeout", arguments.host_timeout, Range(0, LONGEST_S, above=True))
    address, token = _address_and_token(hosts, arguments, environ) if hosts > 1 else (("127.0.0.1", 0), b"")
    return {
        "hosts": hosts,
        "host": host,
        "min_hosts": least,
        "host_timeout_s": arguments.host_timeout,
        "rendezvous": address,
        "token": token,
    }


def _address_and_token(
    hosts: int, arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[tuple[str, int], bytes]:
    """Return the rendezvous address, and the secret with which hosts authenticate. Raises LaunchError."""
    if arguments.rendezvous is None:
        raise LaunchError(
            f"--hosts={hosts} also needs --rendezvous, an address of host 0 and a port, e.g. 10.0.0.1:8475"
        )
    address = split_address(arguments.rendezvous)
    if address is None or address[1] >= 2**16 - PORTS:
        raise LaunchError(
            f"--rendezvous={arguments.rendezvous} must be HOST:PORT with a port in 1..{2**16 - PORTS - 1}, "
            "e.g. 10.0.0.1:8475"
        )
    if arguments.port is not None:
        raise LaunchError(
            f"--port={arguments.port} is for one host: with --hosts={hosts}, processes meet on the {PORTS} ports "
            "after that of --rendezvous"
        )
    token = environ.get(TOKEN, "")
    if len(token) < _MIN_TOKEN:
        raise LaunchError(
            f"{TOKEN} has {len(token)} characters and needs {_MIN_TOKEN}: set it to the same secret on all "
            "hosts, made once by python -c 'import secrets; print(secrets.token_hex())'"
        )
    return address, token.encode()
