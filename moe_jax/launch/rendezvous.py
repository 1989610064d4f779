"""The rendezvous of a run's supervisors: a socket of host 0, at the address of `--rendezvous`."""

import hashlib
import ipaddress
import json
import socket
import threading
import time
from types import TracebackType

from moe_jax.distributed.address import join_address
from moe_jax.launch.channel import BEAT_S, SILENCE_S, Channel, LostError, Message, Objection, admit
from moe_jax.launch.events import JOINED, Events
from moe_jax.launch.remote import Host, RemoteWorker
from moe_jax.launch.start import Launch, LaunchError, WorkerShare

_MAX_UNAUTHENTICATED = 64  # concurrent connections that have not yet proved to know the token
_END_S = 2  # for which other hosts are waited for at the end of the run


def card(launch: Launch) -> Message:
    """Return what a host sends to join: its number, and a hash of what its command must have in common with others."""
    common = [launch.module, list(launch.command), launch.processes, launch.hosts]
    return {"host": launch.host, "run": hashlib.sha256(json.dumps(common).encode()).hexdigest()}


class Rendezvous:
    """Host 0's side of the rendezvous, a context manager; with one host it does not listen.

    Entering it raises LaunchError if the address cannot be opened.
    """

    def __init__(self, launch: Launch, events: Events) -> None:
        self._launch, self._events = launch, events
        self._hosts: dict[int, Host] = {}  # all that have ever joined, by number, without host 0
        self._joining = threading.Lock()
        self._admitting = threading.BoundedSemaphore(_MAX_UNAUTHENTICATED)
        self._server: socket.socket | None = None

    def __enter__(self) -> "Rendezvous":
        if self._launch.hosts > 1:
            self._server = _open(*self._launch.rendezvous)
            threading.Thread(target=self._serve, args=[self._server], daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()
        for host in self._present():
            host.close()

    def missing(self) -> set[int]:
        """Return the hosts that have not joined, or are lost."""
        return set(range(1, self._launch.hosts)) - {host.number for host in self._present()}

    def address(self, number: int) -> str:
        """Return the address at which others reach host 0 or a host that has joined."""
        return self._hosts[number].address if number else self._launch.rendezvous[0]

    def start(self, number: int, share: WorkerShare) -> RemoteWorker:
        """Let another host, which has joined, start a worker."""
        return self._hosts[number].start(share)

    def end(self, code: int) -> None:
        """Let the supervisors of all other hosts end with this exit code."""
        for host in self._present():
            host.send("end", code=code)
        deadline = time.monotonic() + _END_S
        while self._present() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _present(self) -> list[Host]:
        return [host for host in list(self._hosts.values()) if not host.lost]

    def _serve(self, server: socket.socket) -> None:
        server.settimeout(BEAT_S)
        beat_at = 0.0
        while True:
            try:
                connection, _ = server.accept()
                if self._admitting.acquire(blocking=False):
                    threading.Thread(target=self._handle, args=[connection], daemon=True).start()
                else:
                    connection.close()
            except TimeoutError:
                pass
            except OSError:
                if server.fileno() < 0:  # closed
                    return
                time.sleep(BEAT_S)  # too many open files, for now
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                for host in self._present():
                    host.send("beat")

    def _handle(self, connection: socket.socket) -> None:
        """Admit a host, and process its messages until it is lost."""
        try:
            channel = Channel(connection)
        except OSError:  # it is gone
            connection.close()
            self._admitting.release()
            return
        timeout = threading.Timer(SILENCE_S, channel.close)
        timeout.start()
        try:
            number = admit(channel, self._launch.token, self._objection)["host"]
            host = Host(number, channel, self._events)
        except (LostError, OSError):
            channel.close()
            return
        finally:
            timeout.cancel()
            self._admitting.release()
        with self._joining:
            if number not in self.missing():  # two joined with the same number
                channel.close()
                return
            self._hosts[number] = host
        self._events.put((JOINED, number))
        host.listen()

    def _objection(self, other: Message) -> Objection | None:
        number = other.get("host")
        if not (isinstance(number, int) and 0 < number < self._launch.hosts):
            return Objection(f"there is no host {number} of {self._launch.hosts}")
        if other.get("run") != card(self._launch)["run"]:
            return Objection("it was started with another command")
        if number not in self.missing():
            return Objection(f"host {number} is there already", final=False)
        return None


def _open(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(address[0]).is_loopback and not _is_local(host):
            raise LaunchError(
                f"--rendezvous={join_address(host, port)} is {address[0]} on host 0, where no other host can reach it: "
                "give host 0's IP address (hostname -I prints it), or mend /etc/hosts"
            )
        return socket.create_server(address, family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds what it tried to do
        raise LaunchError(
            f"--rendezvous={join_address(host, port)} cannot be opened by host 0 ({reason}): "
            "name an address of its own and a free port"
        ) from None


def _is_local(host: str) -> bool:
    """Whether a host is named as one that only this machine reaches."""
    return host == "localhost" or host.replace(".", "").isdecimal() or ":" in host
