"""Strangers at the ports of a run: what a port scan does, and worse, to all that its processes listen at."""

import os
import random
import re
import socket
import struct
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_TABLES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to call what listens on all interfaces
_TIMEOUT_S = 2
_MOST_OPEN = 256  # connections that stay
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the preface of gRPC, after which settings should come


class Port(NamedTuple):
    """That a process listens at."""

    address: str
    port: int


def listening_ports(processes: Iterable[int]) -> set[Port]:
    """Of these processes, for which this user may look into /proc."""
    inodes = {inode for process in processes for inode in _sockets(process)}
    found = set()
    for table, family in _TABLES:
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and inode in inodes:
                    address, port = local.split(":")
                    found.add(Port(_address(address, family), int(port, 16)))
    return found


def process_tree(root: int) -> list[int]:
    """The process and all that come of it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


class Strangers:
    """Whoever connects to a run's ports; some stay until they are closed."""

    def __init__(self) -> None:
        self._open: deque[socket.socket] = deque()

    def close(self) -> None:
        """Let those leave that have stayed."""
        while self._open:
            self._open.popleft().close()

    def poke(self, port: Port, rng: random.Random) -> int:
        """Connect in each way of `_WAYS`; how many connections were accepted."""
        taken = 0
        for said, end in _WAYS:
            with suppress(OSError):  # it refuses, or hangs up
                address = _OWN.get(port.address, port.address), port.port
                connection = socket.create_connection(address, timeout=_TIMEOUT_S)
                taken += 1
                if end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                if end == "stays":
                    self._keep(connection)
                connection.sendall(rng.randbytes(said) if isinstance(said, int) else said)
                if end != "stays":
                    connection.close()
        return taken

    def _keep(self, connection: socket.socket) -> None:
        self._open.append(connection)
        if len(self._open) > _MOST_OPEN:
            self._open.popleft().close()


# what is sent (a number: so many random bytes), and how the connection ends
_WAYS: tuple[tuple[bytes | int, str], ...] = (
    *((b"", "closes"), (b"", "reset"), (b"", "stays")),
    *((3, "closes"), (3, "stays"), (12, "stays"), (4096, "closes"), (4096, "reset"), (2**17, "stays")),
    *((HTTP, "closes"), (HTTP, "stays"), (HTTP_2, "closes"), (HTTP_2, "stays"), (b'{"kind": "join"', "stays")),
    (b'{"kind": "join"}\n', "closes"),
)


def _sockets(process: int) -> list[str]:
    """Inodes."""
    found = []
    with suppress(OSError):  # it has ended, or is another user's
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    found.append(match[1])
    return found


def _address(words: str, family: int) -> str:
    """As /proc has it: words of four bytes, each in the order of the machine."""
    numbers = bytes.fromhex(words)
    text = socket.inet_ntop(family, b"".join(numbers[i : i + 4][::-1] for i in range(0, len(numbers), 4)))
    return text.removeprefix("::ffff:")  # IPv4 in IPv6
