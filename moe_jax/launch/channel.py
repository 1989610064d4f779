"""A channel of JSON messages, one per line, between the supervisors of a run's hosts.

Each side proves that it knows the run's secret, which is not sent. The contents of a message are never executed: its
reader takes the values that it knows by name.
"""

import hashlib
import hmac
import json
import secrets
import socket
import threading
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

BEAT_S = 1  # between heartbeats
SILENCE_S = 10  # without a message, after which the other side counts as lost
_MAX_LINE = 2**16  # bytes

Message = Mapping[str, Any]


class LostError(ConnectionError):
    """The other side is gone or silent, or has sent an invalid message."""


class RefusedError(Exception):
    """The other side has refused this one. The message is the reason."""


class Objection(NamedTuple):
    """The reason for which a host may not join."""

    why: str
    final: bool = True  # otherwise the host may try again


class Channel:
    """One end of a connection. Several threads may send, but only one may receive."""

    def __init__(self, connection: socket.socket, silence_s: float = SILENCE_S) -> None:
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lines = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return str(self._connection.getpeername()[0])

    def send(self, kind: str, **content: Any) -> None:
        """Send a message. Raises LostError."""
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except (OSError, ValueError) as error:  # ValueError: this end is closed
            raise LostError(str(error)) from None

    def receive(self) -> Message:
        """Return the next message. Raises LostError."""
        try:
            line = self._lines.readline(_MAX_LINE)
            if not line.endswith(b"\n"):
                raise LostError("it closed the connection" if len(line) < _MAX_LINE else "it sent too long a line")
            message = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:
            raise LostError(str(error)) from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise LostError("it sent no message")
        return message

    def close(self) -> None:
        """Close this end; threads that send or receive here get LostError."""
        with suppress(OSError):  # the other side has closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def join(channel: Channel, token: bytes, card: Message) -> None:
    """Authenticate to host 0 with the token, and check that host 0 knows it. Raises LostError or RefusedError.

    `card` identifies this host and its run (see rendezvous.py).
    """
    challenge, own = str(channel.receive().get("nonce")), secrets.token_hex()
    channel.send("join", nonce=own, card=card, proof=_proof(token, "join", challenge, own, card))
    answer = channel.receive()
    if answer["kind"] == "refused":
        raise RefusedError(str(answer.get("why"))[:300])
    if answer["kind"] != "welcome":
        raise LostError(str(answer.get("why"))[:300])
    if not _matches(answer.get("proof"), _proof(token, "welcome", own, challenge, card)):
        raise RefusedError("it does not know this token")


def admit(channel: Channel, token: bytes, check: Callable[[Message], Objection | None]) -> Message:
    """Authenticate a host that wants to join, and return its card.

    Raises LostError if it does not know the token, or if `check` returns an objection to its card.
    """
    own = secrets.token_hex()
    channel.send("hello", nonce=own)
    answer = channel.receive()
    card, challenge = answer.get("card"), str(answer.get("nonce"))
    objection: Objection | None = Objection("it has another token")
    if _matches(answer.get("proof"), _proof(token, "join", own, challenge, card)):
        objection = check(card) if isinstance(card, dict) else Objection("it has no card")
    if objection is not None:
        channel.send("refused" if objection.final else "later", why=objection.why)
        raise LostError(objection.why)
    channel.send("welcome", proof=_proof(token, "welcome", challenge, own, card))
    return typing.cast(Message, card)


def _proof(token: bytes, *content: Any) -> str:
    return hmac.new(token, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _matches(proof: object, expected: str) -> bool:
    return hmac.compare_digest(str(proof).encode(errors="replace"), expected.encode())
