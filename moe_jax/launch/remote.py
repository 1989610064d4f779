"""Host 0's view of the other hosts of a run and their workers."""

import signal
import threading
from contextlib import suppress
from typing import Any

from moe_jax.errors import EXIT_TRY_AGAIN
from moe_jax.launch.channel import Channel, LostError, Message
from moe_jax.launch.events import FORWARDED, Events
from moe_jax.launch.start import WorkerShare
from moe_jax.launch.worker import how_it_ended


class RemoteWorker:
    """A worker of another host, with the state that its supervisor has reported."""

    def __init__(self, host: "Host", rank: int) -> None:
        self.rank, self.code, self.is_stopped = rank, 0, False
        self.has_begun_a_step = False  # since it was started
        self.reached: int | None = None  # steps done
        self.has_no_mesh = False  # whether no mesh fits the devices
        self._host, self._lost = host, False
        self._overdue: str | None = None

    def send(self, number: signal.Signals) -> None:
        self._host.send("signal", rank=self.rank, number=int(number))

    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None:
        """Return how it hangs, as reported by its supervisor, which has the same limits."""
        return self._overdue

    def finish(self, print_errors: bool) -> None:
        """Let its supervisor print the rest of its stderr."""
        self._host.send("finish", rank=self.rank, print_errors=print_errors)

    def how_it_ended(self) -> str:
        return "lost with its host" if self._lost else how_it_ended(self.code)

    def update(self, reached: Any, has_begun: Any, overdue: Any = None, is_stopped: Any = False) -> None:
        """Store the state in a message from its supervisor."""
        self.has_begun_a_step = bool(has_begun)
        self.reached = None if reached is None else int(reached)
        self._overdue = None if overdue is None else str(overdue)[:100]
        self.is_stopped = bool(is_stopped)

    def mark_lost(self) -> None:
        """Record that its host is lost."""
        self._lost = True


class Host:
    """Another host, from joining until it is lost."""

    def __init__(self, number: int, channel: Channel, events: Events) -> None:
        self.number, self.address = number, channel.peer
        self.lost = False
        self._channel, self._events = channel, events
        self._running: dict[int, RemoteWorker] = {}  # by rank
        self._losing = threading.Lock()

    def start(self, share: WorkerShare) -> RemoteWorker:
        """Let the host start a worker, which is lost at once if the host is."""
        worker = RemoteWorker(self, share.rank)
        with self._losing:
            self._running[share.rank] = worker
            if self.lost:
                self._lose_workers()
            else:
                self.send("start", **share._asdict())
        return worker

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; if that fails, the host is lost."""
        try:
            self._channel.send(kind, **content)
        except LostError:
            self.close()

    def listen(self) -> None:
        """Process the host's messages until it is lost, and its workers with it."""
        with suppress(LostError, KeyError, TypeError, ValueError):  # the last three: an invalid message
            while True:
                self._process(self._channel.receive())
        self.close()
        with self._losing:
            self.lost = True
            self._lose_workers()

    def close(self) -> None:
        """Close the connection: the host is lost."""
        self._channel.close()

    def _process(self, message: Message) -> None:
        match message["kind"]:
            case "beat":
                for rank, *state in message["running"]:
                    self._running[rank].update(*state)
            case "ended":
                worker = self._running[message["rank"]]
                worker.update(message["reached"], message["has_begun"])
                worker.has_no_mesh = bool(message["has_no_mesh"])
                self._has_ended(worker, int(message["code"]))
            case "signal":
                self._events.put((FORWARDED, signal.Signals(message["number"])))

    def _lose_workers(self) -> None:
        for worker in list(self._running.values()):
            worker.mark_lost()
            self._has_ended(worker, EXIT_TRY_AGAIN)

    def _has_ended(self, worker: RemoteWorker, code: int) -> None:
        del self._running[worker.rank]
        self._events.put((worker.rank, code))
