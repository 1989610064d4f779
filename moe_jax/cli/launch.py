"""The command that trains with N supervised processes, on this host or on each of several hosts.

    python -m moe_jax.launch --processes N …

Arguments that are not flags of the launcher are passed to every process. Process 0 writes to the terminal; the stderr
of the others is printed with their rank in front of each line. When a process fails or hangs, all are restarted. When
the launcher is stopped, it stops all processes.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from moe_jax.config.ranges import Range, check_number
from moe_jax.environment import lose_output_on_full_disk
from moe_jax.errors import CommandParser, run_command
from moe_jax.launch.follower import follow
from moe_jax.launch.hosts import LONGEST_S, add_arguments, hosts_from
from moe_jax.launch.start import TRAINING, Launch, LaunchError
from moe_jax.launch.supervisor import PORTS, supervise


def main(argv: Sequence[str] | None = None) -> None:
    """Run the processes and exit with 0, or with the code of the process that failed first. Raises LaunchError."""
    parser = CommandParser(
        prog="python -m moe_jax.launch",
        description="Start N processes of one run on this machine, and again from its newest checkpoint when one "
        "fails. All other arguments go to each of them.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many to start, on each host")
    parser.add_argument("--port", type=int, metavar="P", help="where they meet on 127.0.0.1; None: a free one")
    parser.add_argument("--module", default=TRAINING, help="what each of them runs")
    parser.add_argument("--grace", type=float, default=60, metavar="SECONDS", help="left to save and end in")
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="starts without a new step in between")
    parser.add_argument(
        "--min-processes", type=int, metavar="N", help="continue with this many if one fails at every start; None: all"
    )
    parser.add_argument(
        "--progress-timeout", type=float, default=600, metavar="SECONDS", help="without a new step, and all start again"
    )
    parser.add_argument(
        "--start-timeout", type=float, default=3600, metavar="SECONDS", help="the same, before the first new step"
    )
    add_arguments(parser)
    arguments, command = parser.parse_known_args(argv)
    hosts = hosts_from(arguments)
    _check(arguments, hosts["hosts"])
    lose_output_on_full_disk()
    launch = Launch(
        module=arguments.module,
        command=command[1:] if command[:1] == ["--"] else command,
        processes=arguments.processes,
        min_processes=arguments.min_processes or arguments.processes * hosts["min_hosts"],
        port=arguments.port,
        grace_s=arguments.grace,
        retries=arguments.retries,
        progress_timeout_s=arguments.progress_timeout,
        start_timeout_s=arguments.start_timeout,
        **hosts,
    )
    sys.exit(follow(launch) if launch.host else supervise(launch))


def _check(arguments: argparse.Namespace, hosts: int) -> None:
    check_number("--processes", arguments.processes, Range(1, 1024))
    count, factors = arguments.processes * hosts, "--processes" if hosts == 1 else "--processes × --hosts"
    if arguments.min_processes is not None and not 1 <= arguments.min_processes <= count:
        raise LaunchError(f"--min-processes={arguments.min_processes} must be 1..{count} ({factors})")
    if arguments.port is not None and not 0 < arguments.port <= 2**16 - PORTS:
        raise LaunchError(f"--port={arguments.port} must be 1..{2**16 - PORTS}")
    check_number("--grace", arguments.grace, Range(0, LONGEST_S))
    check_number("--retries", arguments.retries, Range(0, 10**6))
    check_number("--progress-timeout", arguments.progress_timeout, Range(0, LONGEST_S, above=True))
    check_number("--start-timeout", arguments.start_timeout, Range(0, LONGEST_S, above=True))
    if not _exists(arguments.module):
        raise LaunchError(f"--module={arguments.module} is not found: name what python -m can run, e.g. moe_jax.train")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its package cannot be imported; the name is empty
        return False


if __name__ == "__main__":
    run_command(main)
