"""A barrier for the processes of one run before jax joins them, which reports the processes that are missing.

jax itself waits without a message, and exits with a C++ stack trace after its timeout. Process 0 listens on the port on
which jax's coordination service listens later, receives one line of JSON from each other process, and answers when all
have arrived. Anybody can connect to this port: a connection that sends anything else is closed, without effect.
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

QUIET_S = 1  # of waiting before a message: processes that are started together arrive within it
QUIET_SUPERVISED_S = 30  # the same under the launcher, which watches all processes
_CONNECT_S = 3  # timeout of a connection to process 0, which may not answer at all
_MAX_LINE = 4096  # bytes
_RETRY_S = 0.1  # between connections to process 0
_POLL_S = 0.25
_SERVICE_S = 60  # until jax's service listens, once all processes have arrived
_MAX_LISTED = 8


class ProcessError(UserError):
    """The processes cannot form one run."""


class AbsentError(ProcessError):
    """Other processes have not arrived in time. A launcher starts all again."""

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return EXIT_TRY_AGAIN if _has_launcher() else EXIT_BAD_INPUT


@dataclass(frozen=True, kw_only=True)
class StartupBarrier:
    """The address at which the processes of a run wait for each other, and their number."""

    address: str  # host:port of process 0
    bind: str | None  # host:port on which process 0 listens; None: all interfaces, with the port of `address`
    num_processes: int
    process_id: int  # of this process
    timeout_s: float


def wait_for_all(barrier: StartupBarrier) -> None:
    """Wait until all processes have arrived; jax's service can then listen there, or does. Raises ProcessError."""
    if barrier.process_id == 0:
        with _listen(barrier) as server:
            if barrier.num_processes > 1:
                _wait_for_others(server, barrier)
    else:
        _call(barrier)
        _await_service(barrier)


class _Timeout:
    """A timeout in seconds, with one message about what is waited for, unless that arrives soon."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds, self._has_reported = time.monotonic(), seconds, False

    def is_over(self, after_s: float = 0) -> bool:
        """Whether the time is over, since `after_s` seconds."""
        return time.monotonic() - self._began > self._seconds + after_s

    def report(self, text: str) -> None:
        """Print what is waited for, on stderr, if that was not done and has taken longer than the quiet time."""
        quiet_s = QUIET_SUPERVISED_S if _has_launcher() else QUIET_S
        if not self._has_reported and time.monotonic() - self._began > quiet_s:
            self._has_reported = True
            sys.stderr.write(f"{text}, at most {self._seconds:g} s\n")
            sys.stderr.flush()


def _wait_for_others(server: socket.socket, barrier: StartupBarrier) -> None:
    timeout, count, arrivals = _Timeout(barrier.timeout_s), barrier.num_processes, _Arrivals(barrier)
    with Reception(server, _MAX_LINE, lambda received: received.endswith(b"\n")) as reception:
        while missing := arrivals.missing():
            here = f"{count - len(missing)} of {count} processes are here"
            if timeout.is_over():
                problem = (
                    f"--coordinator={barrier.address}: {_listed(missing)} did not come within {barrier.timeout_s:g} s "
                    f"({here}): start it with the same --coordinator and --num-processes, or set --join-timeout higher"
                )
                arrivals.answer_all(refused=problem, late=True)
                raise AbsentError(problem)
            timeout.report(f"waiting for {_listed(missing)} at {barrier.address} ({here})")
            for connection, line in reception.hear(_POLL_S):
                arrivals.add(connection, line)
    arrivals.answer_all(all_here=True)  # jax's service can listen here now


def _call(barrier: StartupBarrier) -> None:
    """Report to process 0 that this process has arrived, and wait until all have. Raises ProcessError."""
    timeout, name = _Timeout(barrier.timeout_s), f"--coordinator={barrier.address}"
    while True:
        try:
            answer = _answer(barrier, timeout)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if answer.get("all_here"):
                return
            if "refused" in answer:
                raise (AbsentError if answer.get("late") else ProcessError)(str(answer["refused"])[:1000])
            reason = "something else than process 0 answers"
        if timeout.is_over():
            raise AbsentError(
                f"{name} does not answer for {barrier.timeout_s:g} s ({reason}): "
                "start process 0 there, or correct the address"
            )
        timeout.report(f"process {barrier.process_id} waits for process 0 at {barrier.address} ({reason})")
        time.sleep(_RETRY_S)


def _answer(barrier: StartupBarrier, timeout: _Timeout) -> dict[str, Any]:
    """Connect to process 0, or whatever listens there, and return its answer. Raises OSError."""
    hello = {"process": barrier.process_id, "of": barrier.num_processes}
    line = b""
    with socket.create_connection(_split(barrier.address), timeout=_CONNECT_S) as connection:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        connection.settimeout(_POLL_S)
        while not line.endswith(b"\n"):
            timeout.report(f"process {barrier.process_id} waits for the others at {barrier.address}")
            try:
                part = connection.recv(_MAX_LINE - len(line))
            except TimeoutError:
                if timeout.is_over(after_s=1):  # later than process 0, which knows the missing processes
                    raise
                continue
            if not part:
                raise ConnectionError("it closes the connection")
            line += part
    return _parse_message(line)


def _await_service(barrier: StartupBarrier) -> None:
    """Wait until jax's service listens: its client would retry only after a second. Raises AbsentError."""
    timeout = _Timeout(_SERVICE_S)
    while True:
        with suppress(OSError):
            socket.create_connection(_split(barrier.address), timeout=_CONNECT_S).close()
            return
        if timeout.is_over():
            raise AbsentError(f"--coordinator={barrier.address}: process 0 is gone: start all processes again")
        time.sleep(_RETRY_S / 5)


class _Arrivals:
    """The processes that have arrived, with their connections to process 0."""

    def __init__(self, barrier: StartupBarrier) -> None:
        self._barrier = barrier
        self._connections: dict[int, socket.socket] = {}

    def missing(self) -> set[int]:
        """Return the processes that have not arrived, or have disconnected again."""
        present = self._connections.items()
        self._connections = {process: connection for process, connection in present if _is_waiting(connection)}
        return set(range(1, self._barrier.num_processes)) - self._connections.keys()

    def add(self, connection: socket.socket, line: bytes) -> None:
        """Add a process that has sent this line; close the connection if it is not from a process of the run."""
        message, own = _parse_message(line), self._barrier.num_processes
        process, count = message.get("process"), message.get("of")
        if not isinstance(process, int) or not isinstance(count, int):
            connection.close()
        elif count != own:
            self._refuse(connection, f"process 0 has --num-processes={own}, and process {process} has {count}")
        elif process not in self.missing():
            self._refuse(connection, f"there is a process with --process-id={process} already")
        else:
            self._connections[process] = connection

    def answer_all(self, **answer: Any) -> None:
        """Send an answer to all processes that have arrived, and close their connections."""
        for connection in self._connections.values():
            _send(connection, answer)
            connection.close()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        cure = "give all the same --num-processes, and each a --process-id of its own"
        _send(connection, {"refused": f"--coordinator={self._barrier.address}: {why}: {cure}"})
        connection.close()


def _listen(barrier: StartupBarrier) -> socket.socket:
    """Listen on the address of process 0. Raises ProcessError if it cannot be opened; jax would crash silently."""
    host, port = _split(barrier.bind or barrier.address)
    try:
        if barrier.bind is None or host == "::":  # as jax does
            return _listen_on_all_interfaces(port)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds what it tried to do
        raise ProcessError(
            f"--coordinator={barrier.bind or barrier.address} cannot be opened by process 0 ({reason}): "
            "name an address of its own host and a free port"
        ) from None


def _listen_on_all_interfaces(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port))


def _send(connection: socket.socket, content: dict[str, Any]) -> None:
    with suppress(OSError):  # the other side is gone
        connection.settimeout(1)
        connection.sendall(json.dumps(content).encode() + b"\n")


def _is_waiting(connection: socket.socket) -> bool:
    """Whether the other side is still connected; it sends nothing while it waits. Closes the connection if not."""
    try:
        connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def _parse_message(line: bytes) -> dict[str, Any]:
    """Parse a JSON object; return an empty one if the line is something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(processes: Iterable[int]) -> str:
    numbers = [str(number) for number in sorted(processes)]
    some = numbers if len(numbers) <= _MAX_LISTED else [*numbers[:_MAX_LISTED], f"… ({len(numbers)} in all)"]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(some)}"


def _split(address: str) -> tuple[str, int]:
    found = split_address(address)
    if found is None:
        raise ProcessError(f"--coordinator={address} must be HOST:PORT with a port in 1..65535, e.g. 10.0.0.1:8476")
    return found


def _has_launcher() -> bool:
    return PIPE in os.environ or is_supervised()
