"""The processes of one run assemble before jax joins them, and say for whom they wait.

jax itself waits in silence, and ends with a stack of C++ when its time is over. Process 0 listens where jax's
coordination service listens later, takes one line of JSON from each of the others, and answers when all are here.
Anybody can connect to this port: a connection that says anything else is closed, and nothing comes of it.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moe_jax.distributed.address import split_address
from moe_jax.distributed.heartbeat import PIPE, is_supervised
from moe_jax.errors import EXIT_BAD_INPUT, EXIT_TRY_AGAIN, UserError
from moe_jax.parallel.reception import Reception

QUIET_S = 1  # of a wait about which nothing is said: processes that are started together come within it
QUIET_SUPERVISED_S = 30  # the same under the launcher, which watches all of them
_CALL_S = 3  # that a call of process 0 may take, which may not answer at all
_LONGEST = 4096  # bytes of a line
_AGAIN_S = 0.1  # between calls of process 0
_LOOK_S = 0.25
_SERVICE_S = 60  # until jax's service listens, once all are here
_MOST_LISTED = 8


class ProcessError(UserError):
    """Processes that cannot form one run."""


class AbsentError(ProcessError):
    """Others have not come in time. A launcher starts all again."""

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return EXIT_TRY_AGAIN if _has_launcher() else EXIT_BAD_INPUT


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the processes of a run meet."""

    address: str  # host:port of process 0
    bind: str | None  # where process 0 listens; None: on all interfaces, at the address's port
    num_processes: int
    process_id: int  # this one's
    timeout_s: float


def assemble(meeting: Meeting) -> None:
    """Return once all processes are here; jax's service can then listen there, or does. Raises ProcessError."""
    if meeting.process_id == 0:
        with _listen(meeting) as server:
            if meeting.num_processes > 1:
                _wait_for_others(server, meeting)
    else:
        _call(meeting)
        _await_service(meeting)


class _Patience:
    """With others, for so many seconds. What is waited for is said once, unless it comes soon."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds, self._has_spoken = time.monotonic(), seconds, False

    def is_over(self, after_s: float = 0) -> bool:
        return time.monotonic() - self._began > self._seconds + after_s

    def say(self, text: str) -> None:
        quiet_s = QUIET_SUPERVISED_S if _has_launcher() else QUIET_S
        if not self._has_spoken and time.monotonic() - self._began > quiet_s:
            self._has_spoken = True
            sys.stderr.write(f"{text}, at most {self._seconds:g} s\n")
            sys.stderr.flush()


def _wait_for_others(server: socket.socket, meeting: Meeting) -> None:
    patience, count, attendance = _Patience(meeting.timeout_s), meeting.num_processes, _Attendance(meeting)
    with Reception(server, _LONGEST, lambda said: said.endswith(b"\n")) as reception:
        while missing := attendance.missing():
            here = f"{count - len(missing)} of {count} processes are here"
            if patience.is_over():
                problem = (
                    f"--coordinator={meeting.address}: {_listed(missing)} did not come within {meeting.timeout_s:g} s "
                    f"({here}): start it with the same --coordinator and --num-processes, or set --join-timeout higher"
                )
                attendance.dismiss(refused=problem, late=True)
                raise AbsentError(problem)
            patience.say(f"waiting for {_listed(missing)} at {meeting.address} ({here})")
            for connection, said in reception.receive(_LOOK_S):
                attendance.admit(connection, said)
    attendance.dismiss(all_here=True)  # jax's service can listen here now


def _call(meeting: Meeting) -> None:
    """Say to process 0 that this one is here, and wait until all are. Raises ProcessError."""
    patience, name = _Patience(meeting.timeout_s), f"--coordinator={meeting.address}"
    while True:
        try:
            answer = _answer(meeting, patience)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if answer.get("all_here"):
                return
            if "refused" in answer:
                raise (AbsentError if answer.get("late") else ProcessError)(str(answer["refused"])[:1000])
            reason = "something else than process 0 answers"
        if patience.is_over():
            raise AbsentError(
                f"{name} does not answer for {meeting.timeout_s:g} s ({reason}): "
                "start process 0 there, or correct the address"
            )
        patience.say(f"process {meeting.process_id} waits for process 0 at {meeting.address} ({reason})")
        time.sleep(_AGAIN_S)


def _answer(meeting: Meeting, patience: _Patience) -> dict[str, Any]:
    """Of process 0, or whoever listens there. Raises OSError."""
    card = {"process": meeting.process_id, "of": meeting.num_processes}
    line = b""
    with socket.create_connection(_split(meeting.address), timeout=_CALL_S) as connection:
        connection.sendall(json.dumps(card).encode() + b"\n")
        connection.settimeout(_LOOK_S)
        while not line.endswith(b"\n"):
            patience.say(f"process {meeting.process_id} waits for the others at {meeting.address}")
            try:
                part = connection.recv(_LONGEST - len(line))
            except TimeoutError:
                if patience.is_over(after_s=1):  # process 0, whose time is over as well, knows who is missing
                    raise
                continue
            if not part:
                raise ConnectionError("it closes the connection")
            line += part
    return _message(line)


def _await_service(meeting: Meeting) -> None:
    """Until jax's service listens: its client would call again only after a second. Raises AbsentError."""
    patience = _Patience(_SERVICE_S)
    while True:
        with suppress(OSError):
            socket.create_connection(_split(meeting.address), timeout=_CALL_S).close()
            return
        if patience.is_over():
            raise AbsentError(f"--coordinator={meeting.address}: process 0 is gone: start all processes again")
        time.sleep(_AGAIN_S / 5)


class _Attendance:
    """Which processes are here, as process 0 hears them."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._here: dict[int, socket.socket] = {}

    def missing(self) -> set[int]:
        """Processes that have not come, or have left again."""
        self._here = {process: connection for process, connection in self._here.items() if _is_there(connection)}
        return set(range(1, self._meeting.num_processes)) - self._here.keys()

    def admit(self, connection: socket.socket, said: bytes) -> None:
        """Let a process in that says who it is; a stranger is dropped."""
        message, own = _message(said), self._meeting.num_processes
        process, count = message.get("process"), message.get("of")
        if not isinstance(process, int) or not isinstance(count, int):
            connection.close()
        elif count != own:
            self._refuse(connection, f"process 0 has --num-processes={own}, and process {process} has {count}")
        elif process not in self.missing():
            self._refuse(connection, f"there is a process with --process-id={process} already")
        else:
            self._here[process] = connection

    def dismiss(self, **answer: Any) -> None:
        """Answer all who are here, for the last time."""
        for connection in self._here.values():
            _say(connection, answer)
            connection.close()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        cure = "give all the same --num-processes, and each a --process-id of its own"
        _say(connection, {"refused": f"--coordinator={self._meeting.address}: {why}: {cure}"})
        connection.close()


def _listen(meeting: Meeting) -> socket.socket:
    """Raises ProcessError where jax would crash without a word."""
    host, port = _split(meeting.bind or meeting.address)
    try:
        if meeting.bind is None or host == "::":  # as jax does
            return _everywhere(port)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds what it tried
        raise ProcessError(
            f"--coordinator={meeting.bind or meeting.address} cannot be opened by process 0 ({reason}): "
            "name an address of its own host and a free port"
        ) from None


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port))


def _say(connection: socket.socket, content: dict[str, Any]) -> None:
    with suppress(OSError):  # it is gone
        connection.settimeout(1)
        connection.sendall(json.dumps(content).encode() + b"\n")


def _is_there(connection: socket.socket) -> bool:
    """Whether the other side waits; it says nothing meanwhile."""
    try:
        connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def _message(line: bytes) -> dict[str, Any]:
    """Empty if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(processes: Iterable[int]) -> str:
    numbers = [str(number) for number in sorted(processes)]
    some = numbers if len(numbers) <= _MOST_LISTED else [*numbers[:_MOST_LISTED], f"… ({len(numbers)} in all)"]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(some)}"


def _split(address: str) -> tuple[str, int]:
    found = split_address(address)
    if found is None:
        raise ProcessError(f"--coordinator={address} must be HOST:PORT with a port in 1..65535, e.g. 10.0.0.1:8476")
    return found


def _has_launcher() -> bool:
    return PIPE in os.environ or is_supervised()
