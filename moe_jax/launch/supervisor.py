"""The supervisor of host 0: it starts, watches and ends the workers of a run, and restarts them after a failure.

All workers that run at the same time are a generation. As soon as one of them fails or hangs, the others are killed, as
they could only wait for it; the next generation resumes from the newest checkpoint. With several hosts, host 0 decides
for all of them, and the others follow (`follower.py`).
"""

import queue
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from moe_jax.distributed.address import join_address
from moe_jax.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_TRY_AGAIN
from moe_jax.launch.events import Events, log, put_stop_signals, signal_within
from moe_jax.launch.places import Places
from moe_jax.launch.rendezvous import Rendezvous
from moe_jax.launch.start import TRAINING, Launch, WorkerShare, start, worker_environ
from moe_jax.launch.watch import FINAL, Watch, Watched

PORTS = 16  # that generations use cyclically, as the port of the previous one may still be in use
LONGEST_PAUSE_S = 60


class _Ended(NamedTuple):
    """How a generation ended."""

    code: int  # exit code of the launcher, if it ends with this generation
    message: str = ""  # for the log
    failed: int | None = None  # place of the worker that failed first
    final: bool = True  # whether another generation is of no use
    reached: int = -1  # steps done
    no_mesh: bool = False  # whether no mesh fits the devices


def supervise(launch: Launch) -> int:
    """Run generations until one succeeds or ends the run; return the launcher's exit code. Raises LaunchError."""
    events: Events = queue.SimpleQueue()
    put_stop_signals(events)
    with Rendezvous(launch, events) as others, worker_environ(launch) as environ:
        code = _run_generations(launch, others, environ, events)
        others.end(code)
    return code


def _run_generations(launch: Launch, others: Rendezvous, environ: Mapping[str, str], events: Events) -> int:
    """Run generations, and return the launcher's exit code.

    A failed generation is retried at most `retries` times; the count restarts when a generation gets further than all
    before it. If all retries failed, each time because of the same process, the run continues without that process.
    """
    places = Places(launch.hosts * launch.processes, launch.min_processes, launch.processes)
    tries, furthest = 0, -1
    for generation in count():
        code = _gather(launch, others, places, events)
        if code is not None:
            return code
        ended = _run_generation(launch, generation, places, others, environ, events)
        if ended.reached > furthest:
            tries, furthest = 0, ended.reached
            places.refill()
        if ended.failed is None:
            log(ended.message)
            if ended.final:
                return ended.code
            continue
        places.blame(ended.failed)
        no_mesh = ended.no_mesh and places.some_are_missing
        gives_up = ended.final or tries == launch.retries
        before = len(places.used)
        if (no_mesh or (gives_up and not ended.final)) and places.leave_out(no_mesh):
            tries = 0
            message = f"no mesh of {before} processes" if no_mesh else ended.message
            log(f"{message}: {len(places.used)} of {places.count} processes continue")
            continue
        if gives_up:
            log(f"{ended.message}; gave up after {tries} more tries" if tries and not ended.final else ended.message)
            return ended.code
        tries += 1
        pause_s = min(LONGEST_PAUSE_S, 2 ** (tries - 2)) if tries > 1 else 0
        log(f"{ended.message}: all start again in {pause_s} s, try {tries} of {launch.retries}")
        if stopped_by := signal_within(pause_s, events):
            return _stopped(stopped_by)
    raise AssertionError("generations never run out")


@contextmanager
def reserved_port(wanted: Sequence[int] = (0,), host: str = "127.0.0.1") -> Iterator[int]:
    """Reserve the first free one of these ports until a worker listens there; 0 means any port."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the worker does
        for port in wanted:
            try:
                reserved.bind((address[0], port))
            except OSError:
                continue
            yield int(reserved.getsockname()[1])
            return
        yield wanted[0]  # process 0 reports that it is in use


def _gather(launch: Launch, others: Rendezvous, places: Places, events: Events) -> int | None:
    """Wait for the hosts that were used before, and use those that are present; return the exit code if too few are."""

    def awaited() -> set[int]:
        return others.missing() & places.hosts

    if awaited():
        who, where = ", ".join(map(str, sorted(awaited()))), join_address(*launch.rendezvous)
        log(f"at {where}, waits for host {who}, at most {launch.host_timeout_s:g} s")
        stopped_by = signal_within(launch.host_timeout_s, events, enough=lambda: not awaited())
        if stopped_by:
            return _stopped(stopped_by)
    here = set(range(launch.hosts)) - others.missing()
    if len(here) < launch.min_hosts:
        log(f"{len(here)} of {launch.hosts} hosts came, and --min-hosts={launch.min_hosts}: gave up")
        return EXIT_TRY_AGAIN
    if here != places.hosts:
        log(f"{len(here)} of {launch.hosts} hosts continue")
        places.use_hosts(here)
        if len(places.used) < launch.min_processes:
            log(f"they have {len(places.used)} processes, and --min-processes={launch.min_processes}: gave up")
            return EXIT_TRY_AGAIN
    return None


def _run_generation(
    launch: Launch,
    generation: int,
    places: Places,
    others: Rendezvous,
    environ: Mapping[str, str],
    events: Events,
) -> _Ended:
    """Start the workers of a generation, wait until all have ended, and return how it ended."""
    workers: list[Watched] = []
    used = places.used
    try:
        with _coordinator(launch, generation, others, places.host(used[0])) as coordinator:
            for rank, place in enumerate(used):
                share, host = WorkerShare(rank, place, len(used), coordinator, generation > 0), places.host(place)
                workers.append(others.start(host, share) if host else start(launch, share, environ, events))
            watch = Watch(
                workers,
                events,
                missing=set(range(launch.hosts)) - places.hosts,
                grace_s=launch.grace_s,
                start_timeout_s=launch.start_timeout_s,
                progress_timeout_s=launch.progress_timeout_s,
                trains=launch.module == TRAINING,
            )
            watch.until_all_have_ended()
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)
    everywhere = all(worker.code in (EXIT_BAD_INPUT, EXIT_DIVERGED) for worker in workers)
    for worker in workers:
        worker.finish(print_errors=not everywhere)  # rank 0 has reported it for all
    reached = max((worker.reached for worker in workers if worker.reached is not None), default=-1)
    if watch.failed is not None:
        code, rank = watch.failed.code, watch.failed.rank
        where = f" on host {places.host(used[rank])}" if launch.hosts > 1 else ""
        message = "" if everywhere else f"rank {rank}{where} {watch.failure}"
        if watch.stopped_by:  # a signal arrived after the failure
            return _Ended(128 + watch.stopped_by, f"{message}; stopped by {signal.Signals(watch.stopped_by).name}")
        no_mesh = any(worker.has_no_mesh for worker in workers)
        return _Ended(code if code > 0 else 128 - code, message, used[rank], code in FINAL, reached, no_mesh)
    if watch.newcomer is not None:
        return _Ended(0, f"host {watch.newcomer} has come: all start again", final=False, reached=reached)
    if watch.stopped_by and any(worker.code for worker in workers):
        message = f"stopped by {signal.Signals(watch.stopped_by).name}"
        if watch.stopped_in_time:
            return _Ended(0, f"{message} before a new step: the same command resumes the run")
        return _Ended(128 + watch.stopped_by, message)
    return _Ended(0)


@contextmanager
def _coordinator(launch: Launch, generation: int, others: Rendezvous, host: int) -> Iterator[str]:
    """Choose the coordinator's address of a generation; `host` is that of its rank 0."""
    first = launch.rendezvous[1] + 1 if launch.hosts > 1 else launch.port
    ports = [first + (generation + i) % PORTS for i in range(PORTS)] if first else [0]
    address = others.address(host)
    if host:
        yield join_address(address, ports[0])
    else:
        with reserved_port(ports, address) as port:
            yield join_address(address, port)


def _stopped(number: int) -> int:
    """Log that a signal has stopped the launcher, and return its exit code."""
    log(f"stopped by {signal.Signals(number).name}")
    return 128 + number
