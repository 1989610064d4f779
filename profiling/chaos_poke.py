"""Hostile connections to the ports of a run: a port scan, and worse, of every port that its processes listen on."""

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

_LISTENS = "0A"  # state of a listening socket in /proc/net/tcp
_TABLES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses for calls to sockets that listen on all interfaces
_TIMEOUT_S = 2
_MOST_OPEN = 256  # limit of connections that stay open
_RESET = struct.pack("ii", 1, 0)  # value of SO_LINGER with which closing sends a reset
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the preface of gRPC, which should be followed by settings


class Port(NamedTuple):
    """A port that a process listens on."""

    address: str
    port: int


def listening_ports(processes: Iterable[int]) -> set[Port]:
    """List the listening ports of these processes, as far as this user may read /proc."""
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
    """List the process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process has ended meanwhile
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


class Strangers:
    """Clients that connect to a run's ports; some connections stay open until `close`."""

    def __init__(self) -> None:
        self._open: deque[socket.socket] = deque()

    def close(self) -> None:
        """Close the connections that stayed open."""
        while self._open:
            self._open.popleft().close()

    def poke(self, port: Port, rng: random.Random) -> int:
        """Connect once for each entry of `_WAYS`; return the number of accepted connections."""
        taken = 0
        for data, end in _ATTACKS:
            with suppress(OSError):  # the run refuses the connection or closes it
                address = _OWN.get(port.address, port.address), port.port
                connection = socket.create_connection(address, timeout=_TIMEOUT_S)
                taken += 1
                if end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                if end == "stays":
                    self._keep(connection)
                connection.sendall(rng.randbytes(data) if isinstance(data, int) else data)
                if end != "stays":
                    connection.close()
        return taken

    def _keep(self, connection: socket.socket) -> None:
        self._open.append(connection)
        if len(self._open) > _MOST_OPEN:
            self._open.popleft().close()


# the bytes sent (a number: this many random bytes), and how the connection ends
_ATTACKS: tuple[tuple[bytes | int, str], ...] = (
    *((b"", "closes"), (b"", "reset"), (b"", "stays")),
    *((3, "closes"), (3, "stays"), (12, "stays"), (4096, "closes"), (4096, "reset"), (2**17, "stays")),
    *((HTTP, "closes"), (HTTP, "stays"), (HTTP_2, "closes"), (HTTP_2, "stays"), (b'{"kind": "join"', "stays")),
    (b'{"kind": "join"}\n', "closes"),
)


def _sockets(process: int) -> list[str]:
    """List the inodes of a process's sockets."""
    found = []
    with suppress(OSError):  # the process has ended or belongs to another user
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    found.append(match[1])
    return found


def _address(words: str, family: int) -> str:
    """Parse an address of /proc: words of four bytes, each in the byte order of the machine."""
    numbers = bytes.fromhex(words)
    text = socket.inet_ntop(family, b"".join(numbers[i : i + 4][::-1] for i in range(0, len(numbers), 4)))
    return text.removeprefix("::ffff:")  # IPv4 in IPv6
