"""The supervisor of a host other than host 0: it starts, watches and ends workers as host 0 requests."""

import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from moe_jax.distributed.address import join_address, split_address
from moe_jax.errors import EXIT_TRY_AGAIN
from moe_jax.launch.channel import BEAT_S, SILENCE_S, Channel, LostError, Message, RefusedError, join
from moe_jax.launch.events import MESSAGE, SIGNALLED, Events, log, put_stop_signals, signal_within
from moe_jax.launch.rendezvous import card
from moe_jax.launch.start import TOKEN, Launch, LaunchError, WorkerShare, start, worker_environ
from moe_jax.launch.worker import Worker

_RETRY_S = 0.5  # between connections to host 0


def follow(launch: Launch) -> int:
    """Serve as one of a run's hosts until host 0 ends the run or is lost for too long; return the launcher's exit code.

    Raises LaunchError if host 0 refuses this host.
    """
    events: Events = queue.SimpleQueue()
    put_stop_signals(events)
    with worker_environ(launch) as environ:
        reports = True
        while True:
            found = _join(launch, events, reports)
            if isinstance(found, int):
                return found
            log(f"host {launch.host} has joined")
            code = _Membership(launch, found, environ, events).run()
            if code is not None:
                return code
            log(f"host 0 is lost: its return is waited for, at most {launch.host_timeout_s:g} s")
            reports = False


def _join(launch: Launch, events: Events, reports: bool) -> Channel | int:
    """Connect to host 0, retrying until it answers; return the channel or, after a timeout or a signal, the exit code.

    `reports` is whether to log that host 0 does not answer.
    """
    where = join_address(*launch.rendezvous)
    deadline = time.monotonic() + launch.host_timeout_s
    while True:
        try:
            channel = Channel(socket.create_connection(launch.rendezvous, timeout=SILENCE_S))
            try:
                join(channel, launch.token, card(launch))
                return channel
            except BaseException:
                channel.close()
                raise
        except RefusedError as error:
            raise LaunchError(
                f"--rendezvous={where} refuses host {launch.host} ({error}): "
                f"give all hosts the same command, with a --host of their own, and the same {TOKEN}"
            ) from None
        except OSError as error:
            reason = error.strerror or error
            if time.monotonic() > deadline:
                log(f"host 0 does not take host {launch.host} in at {where} ({reason}): gave up")
                return EXIT_TRY_AGAIN
            if reports:
                log(f"host 0 does not answer at {where} ({reason}): it is called for {launch.host_timeout_s:g} s")
                reports = False
        if stopped_by := signal_within(_RETRY_S, events):
            log(f"stopped by {signal.Signals(stopped_by).name}")
            return 128 + stopped_by


class _Membership:
    """This host's part in the run, from joining until the run ends or host 0 is lost."""

    def __init__(self, launch: Launch, channel: Channel, environ: Mapping[str, str], events: Events) -> None:
        self._launch, self._channel, self._environ, self._events = launch, channel, environ, events
        self._workers: dict[int, Worker] = {}  # of the current generation, by rank
        self._running: set[int] = set()
        self._stopped_by = 0

    def run(self) -> int | None:
        """Return the launcher's exit code, or None if host 0 is lost. All workers have ended then."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        try:
            return self._serve()
        except LostError:
            return 128 + self._stopped_by if self._stopped_by else None
        finally:
            self._channel.close()
            reader.join()
            self._end_all()

    def _read(self) -> None:
        try:
            while True:
                self._events.put((MESSAGE, self._channel.receive()))
        except LostError:
            self._events.put((MESSAGE, None))

    def _serve(self) -> int:
        beat_at = 0.0
        while True:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self._channel.send("beat", running=[self._state(rank) for rank in self._running])
            try:
                kind, value = self._events.get(timeout=max(0, beat_at - time.monotonic()))
            except queue.Empty:
                continue
            if kind >= 0:
                self._has_ended(kind, value)
            elif kind == SIGNALLED:
                self._stopped_by = value
                self._channel.send("signal", number=value)
            elif value is None:
                raise LostError
            elif value["kind"] == "end":
                return int(value["code"])
            else:
                self._execute(value)

    def _execute(self, message: Message) -> None:
        try:
            match message["kind"]:
                case "start":
                    share = _share(self._launch, message)
                    self._workers[share.rank] = start(self._launch, share, self._environ, self._events)
                    self._running.add(share.rank)
                case "signal":
                    self._workers[message["rank"]].send(signal.Signals(message["number"]))
                case "finish":
                    worker = self._workers.pop(message["rank"])
                    threading.Thread(target=worker.finish, args=[bool(message["print_errors"])]).start()  # it may wait
        except (KeyError, TypeError, ValueError) as error:
            raise LostError(f"host 0 has sent an invalid message: {error!r}") from None

    def _has_ended(self, rank: int, code: int) -> None:
        self._running.remove(rank)
        worker = self._workers[rank]
        self._channel.send(
            "ended",
            rank=rank,
            code=code,
            reached=worker.reached,
            has_begun=worker.has_begun_a_step,
            has_no_mesh=worker.has_no_mesh,
        )

    def _state(self, rank: int) -> tuple[Any, ...]:
        worker = self._workers[rank]
        late = worker.overdue(self._launch.start_timeout_s, self._launch.progress_timeout_s)
        return rank, worker.reached, worker.has_begun_a_step, late, worker.is_stopped

    def _end_all(self) -> None:
        """Kill all workers, and drop all events except signals."""
        for worker in self._workers.values():
            worker.send(signal.SIGKILL)
        signals = []
        while self._running or not self._events.empty():
            kind, value = self._events.get()
            self._running.discard(kind)
            if kind == SIGNALLED:
                signals.append(value)
        for worker in self._workers.values():
            worker.finish(print_errors=True)
        for value in signals:
            self._events.put((SIGNALLED, value))


def _share(launch: Launch, message: Message) -> WorkerShare:
    """Parse host 0's request to start a worker. Raises KeyError, TypeError or ValueError if it is invalid."""
    rank, place, processes = (int(message[name]) for name in ("rank", "place", "processes"))
    share = WorkerShare(rank, place, processes, str(message["coordinator"]), bool(message["again"]))
    own = range(launch.host * launch.processes, (launch.host + 1) * launch.processes)
    fits = 0 <= share.rank < share.processes <= launch.hosts * launch.processes
    if share.place not in own or not fits or split_address(share.coordinator) is None:
        raise ValueError(share)
    return share
