"""Transfers of arrays between devices of one or many processes, over one TCP connection per pair of processes."""

import contextlib
import secrets
import socket
import struct
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from moe_jax.errors import MeshError
from moe_jax.parallel.reception import Reception
from moe_jax.parallel.trace_names import ARRIVING

_HELLO = struct.Struct("<IQ")  # own process, and the secret of the process that it connects to
_HEADER = struct.Struct("<IIIIQ")  # key, and the number of bytes that follow
_CONNECT_S = 60  # how long other processes may take to connect
_POLL_S = 0.5
_UNSENT_BYTES = 2**17  # the most that waits in the kernel, where urgent data cannot overtake it


class MessageTag(NamedTuple):
    """Identifies an array until it is received."""

    source: int  # devices
    target: int
    channel: int
    number: int  # counts the collectives on the channel, and the rounds of each

    @property
    def trace(self) -> str:
        """The receiver and its collective, as they appear in traces."""
        return f"{self.target}.{self.channel}.{self.number // 2}"


class P2PTransport:
    """Sends arrays from device to device. `owner_D` is the process of each device."""

    def __init__(self, owner_D: tuple[int, ...]):
        self._owner_D = owner_D
        self._arrived: dict[MessageTag, np.ndarray] = {}  # bytes
        self._expected: dict[MessageTag, np.ndarray] = {}  # the memory that a message is written to, as bytes
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._sockets = _connections()
        self._sending = {process: threading.Lock() for process in self._sockets}
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in self._sockets.items()]
        for reader in self._readers:
            reader.start()

    def send(self, key: MessageTag, x: np.ndarray) -> None:
        """Return when all of `x` is on its way.

        If the other process is gone, pending and later receives raise ConnectionError.
        """
        process = self._owner_D[key.target]
        content = _bytes_of(x)
        if process == jax.process_index():
            target = self._target(key, content.size)
            with jax.profiler.TraceAnnotation(ARRIVING, collective=key.trace):
                target[:] = content
            self._put(key, target)
            return
        try:
            with self._sending[process]:
                self._sockets[process].sendall(_HEADER.pack(*key, content.nbytes))
                self._sockets[process].sendall(content.data)
        except OSError as error:
            self._on_connection_lost(process, error)

    def expect(self, key: MessageTag, out: np.ndarray) -> None:
        """Let the array of this key be written straight to `out`, which is contiguous and has its shape and dtype."""
        with self._changed:
            self._expected[key] = _bytes_of(out)

    def receive(self, key: MessageTag) -> None:
        """Wait until the expected array of this key has arrived. Raises ConnectionError if a process is gone."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._failure)
            if key not in self._arrived:
                raise ConnectionError(self._failure)
            content = self._arrived.pop(key)
            target = self._expected.pop(key, content)
        if target is not content:  # it arrived before `expect` was called
            target[:] = content

    def close(self) -> None:
        """End the connections and their threads. Pending receives raise ConnectionError."""
        with self._changed:
            self._failure = "the connections are closed"
            self._changed.notify_all()
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the other side closed it first
                connection.shutdown(socket.SHUT_RDWR)
        for reader, connection in zip(self._readers, self._sockets.values(), strict=True):
            reader.join()
            connection.close()

    def _target(self, key: MessageTag, size: int) -> np.ndarray:
        with self._changed:
            if key in self._expected:
                return self._expected.pop(key)
        return np.empty(size, np.uint8)

    def _put(self, key: MessageTag, content: np.ndarray) -> None:
        with self._changed:
            self._arrived[key] = content
            self._changed.notify_all()

    def _read(self, process: int, connection: socket.socket) -> None:
        try:
            while True:
                *parts, size = _HEADER.unpack(_exactly(connection, np.empty(_HEADER.size, np.uint8)).tobytes())
                key = MessageTag(*parts)
                with jax.profiler.TraceAnnotation(ARRIVING, collective=key.trace):
                    content = _exactly(connection, self._target(key, size))
                self._put(key, content)
        except OSError as error:
            self._on_connection_lost(process, error)

    def _on_connection_lost(self, process: int, error: OSError) -> None:
        with self._changed:
            self._failure = f"process {process} is gone: {error}"
            self._changed.notify_all()


def _connections() -> dict[int, socket.socket]:
    """Connect to every other process and return the sockets by process.

    A process connects to each process with a lower number, and accepts connections from those with a higher one.
    """
    own, count = jax.process_index(), jax.process_count()
    if count == 1:
        return {}
    address = socket.gethostbyname(socket.gethostname())
    secret = secrets.randbits(62)
    with socket.create_server((address, 0), backlog=count) as server:
        record = [*socket.inet_aton(address), server.getsockname()[1], *_split_number(secret)]
        records = multihost_utils.process_allgather(np.array(record, np.int32))
        connections = {}
        for process in range(own):
            *ip, port, low, high = map(int, records[process])
            connection = _connect_to(socket.inet_ntoa(bytes(ip)), port, process)
            connection.sendall(_HELLO.pack(own, _join_number(low, high)))
            connections[process] = connection
        connections |= _accept_from(server, address, secret, set(range(own + 1, count)))
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return connections


def _connect_to(address: str, port: int, process: int) -> socket.socket:
    try:
        return socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError as error:
        raise MeshError(
            f"process {process} does not answer at {address}:{port} ({error}): let its host name resolve to an address "
            "that the other hosts reach, or leave exchange.algorithm and exchange.reduction to XLA's own collectives"
        ) from None


def _accept_from(server: socket.socket, address: str, secret: int, expected: set[int]) -> dict[int, socket.socket]:
    """Return the connections of the expected processes as soon as all have connected. Other connections are closed."""
    connected: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _CONNECT_S
    with Reception(server, _HELLO.size, lambda hello: False) as reception:
        while missing := expected - connected.keys():
            if time.monotonic() > deadline:
                raise MeshError(
                    f"process {min(missing)} did not call {address} within {_CONNECT_S} s: let this host's name "
                    "resolve to an address that the others reach, or leave exchange.algorithm and exchange.reduction "
                    "to XLA's own collectives"
                )
            for connection, hello in reception.receive(_POLL_S):
                process, received_secret = _HELLO.unpack(hello)
                if received_secret == secret and process in expected - connected.keys():
                    connected[process] = connection
                else:
                    connection.close()
    return connected


def _split_number(number: int) -> tuple[int, int]:
    return number & 0x7FFFFFFF, number >> 31


def _join_number(low: int, high: int) -> int:
    return high << 31 | low


def _exactly(connection: socket.socket, content: np.ndarray) -> np.ndarray:
    """Fill `content` from a connection and return it. Raises ConnectionError if the other side closes it before."""
    view = content.data
    while view:
        count = connection.recv_into(view, flags=socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("it closed the connection")
        view = view[count:]
    return content


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)
