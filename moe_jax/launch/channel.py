"""JSON objects, one a line, between the supervisors of a run's hosts.

Each side proves that it knows the run's secret, which is not sent. What a message holds is never run: its reader takes
the values that it knows by name.
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

BEAT_S = 1  # between signs of life
SILENCE_S = 10  # without one, after which the other side counts as lost
_LONGEST = 2**16  # bytes of a line

Message = Mapping[str, Any]


class LostError(ConnectionError):
    """The other side is gone, silent, or says something that it should not."""


class RefusedError(Exception):
    """The other side is there and wants none of this one. The message is the reason."""


class Objection(NamedTuple):
    """To another side that wants to join."""

    why: str
    final: bool = True  # or it may try again


class Channel:
    """One end of a connection. Several threads may send, one receives."""

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
        """Raises LostError."""
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except (OSError, ValueError) as error:  # ValueError: it is closed here
            raise LostError(str(error)) from None

    def receive(self) -> Message:
        """The next message. Raises LostError."""
        try:
            line = self._lines.readline(_LONGEST)
            if not line.endswith(b"\n"):
                raise LostError("it closed the connection" if len(line) < _LONGEST else "it sent too long a line")
            message = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:
            raise LostError(str(error)) from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise LostError("it sent no message")
        return message

    def close(self) -> None:
        """Whoever sends or receives here gets LostError."""
        with suppress(OSError):  # the other side was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def join(channel: Channel, token: bytes, card: Message) -> None:
    """Prove to host 0 who this is, and let it prove that it is host 0. Raises LostError or RefusedError."""
    asked, own = str(channel.receive().get("nonce")), secrets.token_hex()
    channel.send("join", nonce=own, card=card, proof=_proof(token, "join", asked, own, card))
    answer = channel.receive()
    if answer["kind"] == "refused":
        raise RefusedError(str(answer.get("why"))[:300])
    if answer["kind"] != "welcome":
        raise LostError(str(answer.get("why"))[:300])
    if not _is(answer.get("proof"), _proof(token, "welcome", own, asked, card)):
        raise RefusedError("it does not know this token")


def admit(channel: Channel, token: bytes, check: Callable[[Message], Objection | None]) -> Message:
    """The card of who wants to join and knows the token. Raises LostError if it does not, or if `check` objects."""
    own = secrets.token_hex()
    channel.send("hello", nonce=own)
    answer = channel.receive()
    card, asked = answer.get("card"), str(answer.get("nonce"))
    objection: Objection | None = Objection("it has another token")
    if _is(answer.get("proof"), _proof(token, "join", own, asked, card)):
        objection = check(card) if isinstance(card, dict) else Objection("it has no card")
    if objection is not None:
        channel.send("refused" if objection.final else "later", why=objection.why)
        raise LostError(objection.why)
    channel.send("welcome", proof=_proof(token, "welcome", asked, own, card))
    return typing.cast(Message, card)


def _proof(token: bytes, *said: Any) -> str:
    return hmac.new(token, json.dumps(said, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _is(proof: object, expected: str) -> bool:
    return hmac.compare_digest(str(proof).encode(errors="replace"), expected.encode())
