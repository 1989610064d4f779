"""Connections to a socket that anybody can reach, until each has sent its first message. Imports no jax.

A port scanner connects and leaves, stays silent, or sends too much. It does not keep other callers from being served.
"""

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

SILENCE_S = 10  # within which a caller has to send its whole message
_MAX_CALLERS = 64  # at most, with an incomplete message; with one more, the oldest is dropped
_PAUSE_S = 0.1  # after a connection that cannot be accepted


class Reception:
    """Receives the first message of each caller of `server`: `max_bytes`, or fewer if `is_complete` accepts them.

    A context manager: leaving it closes the server and the connections of callers whose message is incomplete.
    """

    def __init__(self, server: socket.socket, max_bytes: int, is_complete: Callable[[bytes], bool]) -> None:
        self._server, self._max_bytes, self._is_complete = server, max_bytes, is_complete
        # time of the connection and bytes so far, oldest caller first
        self._received: dict[socket.socket, tuple[float, bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._selector.close()
        self._server.close()
        for caller in self._received:
            caller.close()

    def receive(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Return the connections whose message was completed within `seconds`, with the message.

        The caller of this method closes these connections.
        """
        complete = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._received:
                data = self._read(key.fileobj)
                complete += [(key.fileobj, data)] if data else []
        for caller, (since, _) in list(self._received.items()):
            if time.monotonic() - since > SILENCE_S:
                self._drop(caller)
        return complete

    def _accept(self) -> None:
        try:
            caller, _ = self._server.accept()
        except OSError:  # the caller has closed it, or the process has too many open files for now
            time.sleep(_PAUSE_S)
            return
        caller.setblocking(False)
        if len(self._received) >= _MAX_CALLERS:
            self._drop(next(iter(self._received)))
        self._received[caller] = time.monotonic(), b""
        self._selector.register(caller, selectors.EVENT_READ)

    def _read(self, caller: socket.socket) -> bytes:
        """Return the whole message of a caller; empty if it is incomplete, or if the caller is gone."""
        since, data = self._received[caller]
        chunk = b""
        try:
            chunk = caller.recv(self._max_bytes - len(data))
        except BlockingIOError:
            return b""
        except OSError:
            pass
        if not chunk:
            self._drop(caller)
            return b""
        data += chunk
        if len(data) < self._max_bytes and not self._is_complete(data):
            self._received[caller] = since, data
            return b""
        del self._received[caller]
        self._selector.unregister(caller)
        caller.setblocking(True)
        return data

    def _drop(self, caller: socket.socket) -> None:
        del self._received[caller]
        with suppress(KeyError):
            self._selector.unregister(caller)
        caller.close()
