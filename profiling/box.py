"""A network testbed on one machine: processes in network namespaces, joined by switches through throttled links.

Every process has its own link to the switch of its node. With several processes per node, the switches of the nodes are
connected to one more switch, by links that are throttled from the start. With one process per node, the link of the
process is the link of the node.

`run_in_box` starts the calling command again in every namespace, where `rank()` returns the index of the process. Needs
Linux, root, and the programs of iproute2 and util-linux. It removes everything that it creates.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from count_argument import check_least

from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import ConfigError, UserError
from moe_jax.parallel.p2p_transport import MessageTag, P2PTransport

_PROGRAMS = ("ip", "tc", "taskset", "unshare", "setpriv", "hostname")
_RANK = "BOX_RANK"
_SIZE = "BOX_PROCESSES"
_RESULTS = "BOX_RESULTS"
LINK = "eth0"  # name of the link inside every namespace
# Burst of a node's link. A large free burst would make short messages cheap and bend the fitted line of their times.
_NODE_BURST = "16kb"
_NODE_QUEUE = "16mb"  # no loss, however much the processes of a node send at once
_GROUPS = Path("/sys/fs/cgroup/cpu")
_QUOTA_FILE = "cpu.cfs_quota_us"
_QUOTA = "BOX_QUOTA"  # the number of this file, open
_PERIOD_US = 4_000  # in which a process computes for its share, and then waits
_UNITS = {"": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class BoxError(UserError):
    """Raised if the testbed cannot be built on this machine."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """The number of processes, and the links and cores of each. Construction checks the values and raises BoxError."""

    processes: int = 2
    ranks_per_node: int = 1  # consecutive ranks share a node
    node_bits_per_s: float | None = None  # rate out of a node with several processes
    cores: tuple[int, ...]  # process i is pinned to core i modulo their number
    threads: int = 1  # of XLA's pool in each process; with one thread, XLA's own collectives overlap nothing
    limits_cpu: bool = False  # whether processes may be limited to a share of a core (`set_share`)

    def __post_init__(self) -> None:
        if not 2 <= self.processes <= 4:
            raise BoxError(f"--processes={self.processes} must be 2..4")
        if self.ranks_per_node < 1 or self.processes % self.ranks_per_node:
            raise BoxError(
                f"--ranks-per-node={self.ranks_per_node} does not divide --processes={self.processes}: "
                "use 1 or a divisor"
            )
        if (self.ranks_per_node > 1) != (self.node_bits_per_s is not None):
            raise BoxError(
                f"--ranks-per-node={self.ranks_per_node}: nodes of several processes, and no others, need a --rate "
                "between nodes"
            )
        unknown = set(self.cores) - os.sched_getaffinity(0)
        if unknown or not self.cores:
            allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            raise BoxError(
                f"--cores={','.join(map(str, self.cores))} are not all free for use here: choose of {allowed}"
            )
        if self.threads < 1:
            raise BoxError(f"--threads={self.threads} must be at least 1")

    @property
    def nodes(self) -> int:
        return self.processes // self.ranks_per_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `box_from` reads."""
    group = parser.add_argument_group("box")
    group.add_argument("--processes", type=int, default=2, metavar="N", help="2..4 (default 2)")
    group.add_argument("--cores", metavar="I,J,…", help="cores to pin processes to, round-robin (default: all)")
    group.add_argument("--threads", type=int, default=1, help="of XLA's pool in each process (default 1)")


def add_round_flags(parser: argparse.ArgumentParser, *, rate: str, out_of: str, unit: str, rounds: int) -> None:
    """Add the flags of a benchmark that alternates its variants, round by round, over links of a given rate."""
    parser.add_argument("--config", default="configs/bench/box.yaml")
    parser.add_argument("--rate", default=rate, help=f"out of each {out_of} (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help=f"of a {unit} (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")


def parse_round_flags(parser: argparse.ArgumentParser, *, unit: str, processes: Sequence[int]) -> argparse.Namespace:
    """Read the command line of a benchmark of rounds. The default of `processes` is the first. Raises UserError."""
    add_round_flags(parser, rate="1gbit", out_of="process", unit=unit, rounds=12)
    add_arguments(parser)
    parser.set_defaults(processes=processes[0])
    arguments = parser.parse_args()
    check_least(arguments, steps=1, rounds=2)
    if arguments.processes not in processes:
        raise ConfigError(f"--processes={arguments.processes}: this needs {' or '.join(map(str, processes))}")
    return arguments


def box_from(arguments: argparse.Namespace, **nodes: Any) -> Box:
    """Return the box that the parsed flags describe; `nodes` are further fields of it. Raises BoxError."""
    try:
        cores = tuple(int(core) for core in arguments.cores.split(",")) if arguments.cores else None
    except ValueError:
        raise BoxError(f"--cores={arguments.cores} must be core numbers, e.g. 0,1") from None
    return Box(
        processes=arguments.processes,
        cores=tuple(sorted(os.sched_getaffinity(0))) if cores is None else cores,
        threads=arguments.threads,
        **nodes,
    )


def parse_rate(text: str, flag: str = "--rate") -> float:
    """Parse bits per second, e.g. "400mbit". Raises BoxError."""
    match = re.fullmatch(r"([0-9.]+)(|kbit|mbit|gbit)", text)
    try:
        bits_per_s = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        bits_per_s = 0.0
    if bits_per_s < 10**6:
        raise BoxError(f"{flag}={text} must be at least 1mbit, e.g. 400mbit or 1gbit")
    return bits_per_s


def rank() -> int | None:
    """Return the rank of this process in its box, or None outside of a box."""
    text = os.environ.get(_RANK)
    return None if text is None else int(text)


def join(devices: int = 1) -> None:
    """Join the other processes of the box, with this number of CPU devices each."""
    size = int(os.environ[_SIZE])
    initialize(
        Processes(coordinator=f"{address(0)}:8476", num_processes=size, process_id=rank()),
        cpu_devices=size * devices,
    )


def set_rate(bits_per_s: float, burst_kb: int = 256, queue: str = "latency 50ms") -> None:
    """Limit what this process sends from now on, except for a burst after a pause. Only valid inside a box.

    `queue` limits what waits to be sent: a `latency`, or a `limit` in bytes. Packets beyond it are dropped and sent
    again.
    """
    tbf = f"rate {bits_per_s:.0f}bit burst {burst_kb}kb {queue}"
    _run("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *tbf.split())


def set_data_rate(bits_per_s: float) -> None:
    """Limit what this process sends from now on, except for acknowledgements; nothing is lost, and no burst is free.

    Acknowledgements that queue after a process's own data would delay what others send. Only valid inside a box.
    """
    data = _limited(2, bits_per_s)
    changed = subprocess.run(f"tc class change dev {LINK} {data}".split(), capture_output=True, check=False)
    if changed.returncode:  # not there yet
        _run(*f"tc qdisc replace dev {LINK} root handle 1: htb default 2".split())
        _run(*f"tc class add dev {LINK} parent 1: classid 1:1 htb rate 10gbit quantum 60000".split())
        _run(*f"tc class add dev {LINK} parent 1: {data}".split())
        _run(*f"tc qdisc add dev {LINK} parent 1:2 bfifo limit 32mb".split())
        small = "u32 match u16 0 0xff80 at 2"  # shorter than 128 bytes
        _run(*f"tc filter add dev {LINK} protocol ip parent 1: prio 1 {small} flowid 1:1".split())


def set_neighbour_rate(bits_per_s: float, neighbours: Sequence[int]) -> None:
    """Limit what this process sends to some ranks by a limit of its own, as if they had links of their own.

    Only valid inside a box, after `set_data_rate`.
    """
    _run(*f"tc class add dev {LINK} parent 1: {_limited(3, bits_per_s)}".split())
    _run(*f"tc qdisc add dev {LINK} parent 1:3 bfifo limit 32mb".split())
    for to in map(address, neighbours):
        _run(*f"tc filter add dev {LINK} protocol ip parent 1: prio 2 u32 match ip dst {to}/32 flowid 1:3".split())


def _limited(number: int, bits_per_s: float) -> str:
    return f"classid 1:{number} htb rate {bits_per_s:.0f}bit burst 20kb cburst 20kb quantum 60000"


def set_latency(seconds: float) -> None:
    """Delay each message of the collectives in the background by blocking its sender, like the start-up time of a link.

    Used since kernels without netem cannot delay packets.
    """
    send = P2PTransport.send

    def late(self: P2PTransport, key: MessageTag, x: np.ndarray) -> None:
        time.sleep(seconds)
        send(self, key, x)

    P2PTransport.send = late  # type: ignore[method-assign]


def set_share(share: float) -> None:
    """Let this process compute for this share of the time only. Only valid inside a box that `limits_cpu`."""
    os.write(int(os.environ[_QUOTA]), str(round(share * _PERIOD_US)).encode())


def set_buffers(num_bytes: int) -> None:
    """Set the buffer size of sockets that this process opens from now on.

    Only valid inside a box, since the setting applies to the whole namespace.
    """
    for direction in ("rmem", "wmem"):
        Path(f"/proc/sys/net/ipv4/tcp_{direction}").write_text(f"4096 {num_bytes} {num_bytes}")


def return_values(values: Any) -> None:
    """Return plain values to the caller of `run_in_box`; only those of rank 0 are used."""
    if rank() == 0:
        Path(os.environ[_RESULTS]).write_text(json.dumps(values))


def run_in_box(box: Box) -> Any:
    """Run this command again as every process of `box`, and return the values that rank 0 handed back.

    Raises BoxError if the box cannot be built here. If a process fails, ends this program with the exit code of the
    first one that failed.
    """
    check_possible()
    with _stop_on_signals(), tempfile.TemporaryDirectory() as folder, namespaces(box) as names:
        results = Path(folder) / "results.json"
        running = [_start(box, rank, name, results) for rank, name in enumerate(names)]
        try:
            while any(process.poll() is None for process in running):
                if any(process.returncode for process in running):
                    time.sleep(3)  # the other processes fail as a consequence; let them report why
                    break
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
            codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(next((code for code in codes if code > 0), 1))
        return json.loads(results.read_text())


def _start(box: Box, rank: int, name: str, results: Path) -> subprocess.Popen[bytes]:
    chain = [*inside(name), "taskset", "--cpu-list", str(box.cores[rank % len(box.cores)]), sys.executable]
    variables = {_RANK: str(rank), _SIZE: str(box.processes), _RESULTS: str(results)}
    variables |= {"PJRT_NPROC": str(box.threads), "JAX_PLATFORMS": "cpu"}
    if not box.limits_cpu:
        return subprocess.Popen([*chain, *sys.argv], env=os.environ | variables, start_new_session=True)
    # a namespace has no control groups, so the process joins before it enters, with the open file of its limit
    group = _share_group(name)
    with (group / _QUOTA_FILE).open("w") as quota:
        chain = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *chain]
        variables[_QUOTA] = str(quota.fileno())
        return subprocess.Popen(
            [*chain, *sys.argv], env=os.environ | variables, start_new_session=True, pass_fds=[quota.fileno()]
        )


def inside(name: str) -> list[str]:
    """Return the prefix of a command that is to run in a namespace and to end with this process.

    Every program of this chain executes the next one in its own process, so that the process started is the one that
    computes.
    """
    chain = ["ip", "netns", "exec", name, "setpriv", "--pdeathsig", "KILL", "unshare", "--uts"]
    return [*chain, "sh", "-c", 'hostname "$0"; exec "$@"', name]


def check_possible() -> None:
    """Raise BoxError if this machine cannot build a box."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise BoxError(f"a box needs {', '.join(missing)}: install iproute2, util-linux and hostname")
    if os.geteuid() != 0:
        raise BoxError("a box needs root, to make network namespaces and throttle their links: run it with sudo")


@contextmanager
def namespaces(box: Box) -> Iterator[list[str]]:
    """Create namespaces on switches, with a hosts file for each, and remove them at the end.

    gloo listens at the address that the host name resolves to, so the hosts files map all names to addresses in the
    box.
    """
    names = [f"moebox{os.getpid()}n{i}" for i in range(box.processes)]
    tree = f"moebox{os.getpid()}switch"
    switches = [tree] if box.ranks_per_node == 1 else [f"{tree}{node}" for node in range(box.nodes)]
    _remove([name for name in _existing() if not _is_running(name)])
    try:
        for switch in dict.fromkeys([tree, *switches]):
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for node, switch in enumerate(switches if len(switches) > 1 else []):
            _run(*f"ip link add uplink netns {switch} type veth peer name port{node} netns {tree}".split())
            for place, port in ((switch, "uplink"), (tree, f"port{node}")):
                _run(*f"ip -n {place} link set {port} master bridge0 up".split())
            tbf = f"rate {box.node_bits_per_s:.0f}bit burst {_NODE_BURST} limit {_NODE_QUEUE}"
            _run(*f"tc -n {switch} qdisc replace dev uplink root tbf {tbf}".split())
        for i, name in enumerate(names):
            switch = switches[i // box.ranks_per_node % len(switches)]
            hosts = _hosts(name)
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address(j)} {n}\n" for j, n in enumerate(names)))
            _run("ip", "netns", "add", name)
            _run(*f"ip link add {LINK} netns {name} type veth peer name rank{i} netns {switch}".split())
            _run(*f"ip -n {switch} link set rank{i} master bridge0 up".split())
            _run(*f"ip -n {name} addr add {address(i)}/24 dev {LINK}".split())
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", LINK, "up")
        yield names
    finally:
        _remove([*names, *dict.fromkeys([*switches, tree])])


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(_hosts(name).parent, ignore_errors=True)
        with suppress(OSError):  # it has none
            (_GROUPS / name).rmdir()


def _existing() -> list[str]:
    """List the namespaces of all boxes; those of a box that was killed still exist."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^moebox\d+\w+", listed, re.MULTILINE)


def _is_running(name: str) -> bool:
    owner = re.match(r"moebox(\d+)", name)
    return owner is not None and Path("/proc", owner[1]).exists()


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Run all `finally` blocks on SIGINT or SIGTERM, and ignore further signals meanwhile."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, _: object) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BoxError(
            f"{' '.join(command)} failed ({done.stderr.strip()}): "
            "a box needs a kernel with network namespaces, veth, bridge, tbf and htb, and the right to use them"
        )


def _share_group(name: str) -> Path:
    """Make the control group of a process, which other load on the machine hardly slows down. Raises BoxError."""
    group = _GROUPS / name
    try:
        group.mkdir()
        for file, value in {"cpu.cfs_period_us": _PERIOD_US, "cpu.shares": 10 * 1024}.items():
            (group / file).write_text(str(value))
    except OSError as error:
        raise BoxError(
            f"{group} cannot limit CPU time ({error.strerror}): shares of a core need control groups of version 1"
        ) from None
    return group


def _hosts(name: str) -> Path:
    """Return the hosts file that `ip netns exec` mounts as /etc/hosts."""
    return Path("/etc/netns") / name / "hosts"


def address(rank: int) -> str:
    """Return the address of a rank in the network of the box."""
    return f"10.77.0.{rank + 1}"
