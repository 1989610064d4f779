"""Arrays sent between devices of one or many processes, over one TCP connection for each pair of processes."""

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

_HELLO = struct.Struct("<IQ")  # process, and the secret of the process it calls
_HEADER = struct.Struct("<IIIIQ")  # key, and the bytes that follow
_PATIENCE_S = 60  # for other processes to connect
_LOOK_S = 0.5
_UNSENT_BYTES = 2**17  # at most in the kernel, as nothing urgent gets past them there


class MessageTag(NamedTuple):
    """What an array is known by until it is received."""

    source: int  # devices
    target: int
    channel: int
    number: int  # of the collective on its channel, and of its round

    @property
    def trace(self) -> str:
        """Who receives it, and for what, in traces."""
        return f"{self.target}.{self.channel}.{self.number // 2}"


class P2PTransport:
    """Sends arrays from device to device. `owner_D` is the process of each device."""

    def __init__(self, owner_D: tuple[int, ...]):
        self._owner_D = owner_D
        self._arrived: dict[MessageTag, np.ndarray] = {}  # bytes
        self._awaited: dict[MessageTag, np.ndarray] = {}  # where what comes shall go, as bytes
        self._changed = threading.Condition()
        self._gone: str | None = None
        self._sockets = _connections()
        self._sending = {process: threading.Lock() for process in self._sockets}
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in self._sockets.items()]
        for reader in self._readers:
            reader.start()

    def send(self, key: MessageTag, x: np.ndarray) -> None:
        """Returns when all of `x` is on its way. If the other side is gone, who waits for it is told."""
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
            self._lose(process, error)

    def expect(self, key: MessageTag, out: np.ndarray) -> None:
        """Let the array of this key go straight to `out`, which is contiguous and of its shape and dtype."""
        with self._changed:
            self._awaited[key] = _bytes_of(out)

    def receive(self, key: MessageTag) -> None:
        """Wait until the expected array of this key has come. Raises ConnectionError if a process is gone."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._gone)
            if key not in self._arrived:
                raise ConnectionError(self._gone)
            content = self._arrived.pop(key)
            target = self._awaited.pop(key, content)
        if target is not content:  # it came before it was expected
            target[:] = content

    def close(self) -> None:
        """End the connections and their threads; who still waits is told."""
        with self._changed:
            self._gone = "the connections are closed"
            self._changed.notify_all()
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)
        for reader, connection in zip(self._readers, self._sockets.values(), strict=True):
            reader.join()
            connection.close()

    def _target(self, key: MessageTag, size: int) -> np.ndarray:
        with self._changed:
            if key in self._awaited:
                return self._awaited.pop(key)
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
            self._lose(process, error)

    def _lose(self, process: int, error: OSError) -> None:
        with self._changed:
            self._gone = f"process {process} is gone: {error}"
            self._changed.notify_all()


def _connections() -> dict[int, socket.socket]:
    """One to every other process: to each lower one from here, from each higher one to here."""
    own, count = jax.process_index(), jax.process_count()
    if count == 1:
        return {}
    address = socket.gethostbyname(socket.gethostname())
    secret = secrets.randbits(62)
    with socket.create_server((address, 0), backlog=count) as server:
        card = [*socket.inet_aton(address), server.getsockname()[1], *_words(secret)]
        cards = multihost_utils.process_allgather(np.array(card, np.int32))
        connections = {}
        for process in range(own):
            *ip, port, low, high = map(int, cards[process])
            connection = _called(socket.inet_ntoa(bytes(ip)), port, process)
            connection.sendall(_HELLO.pack(own, _number(low, high)))
            connections[process] = connection
        connections |= _callers(server, address, secret, set(range(own + 1, count)))
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return connections


def _called(address: str, port: int, process: int) -> socket.socket:
    try:
        return socket.create_connection((address, port), timeout=_PATIENCE_S)
    except OSError as error:
        raise MeshError(
            f"process {process} does not answer at {address}:{port} ({error}): let its host name resolve to an address "
            "that the other hosts reach, or leave exchange.algorithm and exchange.reduction to XLA's own collectives"
        ) from None


def _callers(server: socket.socket, address: str, secret: int, awaited: set[int]) -> dict[int, socket.socket]:
    """The connections of these processes, as soon as all have called; strangers are dropped."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _PATIENCE_S
    with Reception(server, _HELLO.size, lambda said: False) as reception:
        while missing := awaited - found.keys():
            if time.monotonic() > deadline:
                raise MeshError(
                    f"process {min(missing)} did not call {address} within {_PATIENCE_S} s: let this host's name "
                    "resolve to an address that the others reach, or leave exchange.algorithm and exchange.reduction "
                    "to XLA's own collectives"
                )
            for connection, said in reception.hear(_LOOK_S):
                process, given = _HELLO.unpack(said)
                if given == secret and process in awaited - found.keys():
                    found[process] = connection
                else:
                    connection.close()
    return found


def _words(number: int) -> tuple[int, int]:
    return number & 0x7FFFFFFF, number >> 31


def _number(low: int, high: int) -> int:
    return high << 31 | low


def _exactly(connection: socket.socket, content: np.ndarray) -> np.ndarray:
    """Fills bytes. Raises ConnectionError if the other side ends before."""
    view = content.data
    while view:
        count = connection.recv_into(view, flags=socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("it closed the connection")
        view = view[count:]
    return content


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)
