"""The other hosts of a run and their workers, as host 0 sees them."""

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
    """A worker of another host, with what its supervisor tells of it."""

    def __init__(self, host: "Host", rank: int) -> None:
        self.rank, self.code, self.is_stopped = rank, 0, False
        self.has_begun_a_step = False  # since it was started
        self.reached: int | None = None  # steps done, as it told
        self.has_no_mesh = False  # as it told
        self._host, self._lost = host, False
        self._overdue: str | None = None

    def send(self, number: signal.Signals) -> None:
        self._host.tell("signal", rank=self.rank, number=int(number))

    def overdue(self, start_timeout_s: float, progress_timeout_s: float) -> str | None:
        """As its supervisor has it, which was given the same limits."""
        return self._overdue

    def finish(self, tell_errors: bool) -> None:
        """Let its supervisor pass on what is left of its errors."""
        self._host.tell("finish", rank=self.rank, tell_errors=tell_errors)

    def how_it_ended(self) -> str:
        return "lost with its host" if self._lost else how_it_ended(self.code)

    def heard(self, reached: Any, has_begun: Any, overdue: Any = None, is_stopped: Any = False) -> None:
        """Take over what is told of it."""
        self.has_begun_a_step = bool(has_begun)
        self.reached = None if reached is None else int(reached)
        self._overdue = None if overdue is None else str(overdue)[:100]
        self.is_stopped = bool(is_stopped)

    def lose(self) -> None:
        """Nothing is heard of it any more."""
        self._lost = True


class Host:
    """One other host, from its joining until it is lost."""

    def __init__(self, number: int, channel: Channel, events: Events) -> None:
        self.number, self.address = number, channel.peer
        self.lost = False
        self._channel, self._events = channel, events
        self._running: dict[int, RemoteWorker] = {}  # by rank
        self._losing = threading.Lock()

    def start(self, part: WorkerShare) -> RemoteWorker:
        """Let it start a worker, which is lost at once if the host is."""
        worker = RemoteWorker(self, part.rank)
        with self._losing:
            self._running[part.rank] = worker
            if self.lost:
                self._lose_workers()
            else:
                self.tell("start", **part._asdict())
        return worker

    def tell(self, kind: str, **content: Any) -> None:
        """Send a message; a host that takes none is lost."""
        try:
            self._channel.send(kind, **content)
        except LostError:
            self.close()

    def listen(self) -> None:
        """Take over what it tells, until it is lost and its workers with it."""
        with suppress(LostError, KeyError, TypeError, ValueError):  # the last three: it says what it should not
            while True:
                self._hear(self._channel.receive())
        self.close()
        with self._losing:
            self.lost = True
            self._lose_workers()

    def close(self) -> None:
        """Drop it."""
        self._channel.close()

    def _hear(self, message: Message) -> None:
        match message["kind"]:
            case "beat":
                for rank, *told in message["running"]:
                    self._running[rank].heard(*told)
            case "ended":
                worker = self._running[message["rank"]]
                worker.heard(message["reached"], message["has_begun"])
                worker.has_no_mesh = bool(message["has_no_mesh"])
                self._has_ended(worker, int(message["code"]))
            case "signal":
                self._events.put((FORWARDED, signal.Signals(message["number"])))

    def _lose_workers(self) -> None:
        for worker in list(self._running.values()):
            worker.lose()
            self._has_ended(worker, EXIT_TRY_AGAIN)

    def _has_ended(self, worker: RemoteWorker, code: int) -> None:
        del self._running[worker.rank]
        self._events.put((worker.rank, code))
