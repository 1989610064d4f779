"""Callers of a socket that anybody can reach, until they have said who they are. Imports no jax.

A port scanner connects and leaves, or stays and says nothing, or too much: it keeps nobody else from being heard.
"""

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

SILENCE_S = 10  # in which a caller has to say all
_MOST_CALLERS = 64  # who have not; then the oldest is dropped
_PAUSE_S = 0.1  # when no connection can be taken


class Reception:
    """Hears what each caller of `server` says first: at most `longest` bytes, or fewer that `are_all`.

    A context: leaving it closes the server and drops whoever has not said all.
    """

    def __init__(self, server: socket.socket, longest: int, are_all: Callable[[bytes], bool]) -> None:
        self._server, self._longest, self._are_all = server, longest, are_all
        self._said: dict[socket.socket, tuple[float, bytes]] = {}  # oldest caller first, and since when
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._selector.close()
        self._server.close()
        for caller in self._said:
            caller.close()

    def hear(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Who has said all within that time, and what; whoever calls this closes these connections."""
        heard = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._let_in()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._said:
                said = self._read(key.fileobj)
                heard += [(key.fileobj, said)] if said else []
        for caller, (since, _) in list(self._said.items()):
            if time.monotonic() - since > SILENCE_S:
                self._drop(caller)
        return heard

    def _let_in(self) -> None:
        try:
            caller, _ = self._server.accept()
        except OSError:  # it has hung up, or no more files can be opened for now
            time.sleep(_PAUSE_S)
            return
        caller.setblocking(False)
        if len(self._said) >= _MOST_CALLERS:
            self._drop(next(iter(self._said)))
        self._said[caller] = time.monotonic(), b""
        self._selector.register(caller, selectors.EVENT_READ)

    def _read(self, caller: socket.socket) -> bytes:
        """All that it says; empty: it has not said all yet, or is gone."""
        since, said = self._said[caller]
        part = b""
        try:
            part = caller.recv(self._longest - len(said))
        except BlockingIOError:
            return b""
        except OSError:
            pass
        if not part:
            self._drop(caller)
            return b""
        said += part
        if len(said) < self._longest and not self._are_all(said):
            self._said[caller] = since, said
            return b""
        del self._said[caller]
        self._selector.unregister(caller)
        caller.setblocking(True)
        return said

    def _drop(self, caller: socket.socket) -> None:
        del self._said[caller]
        with suppress(KeyError):
            self._selector.unregister(caller)
        caller.close()
