"""Workers of one run: started together, watched, ended together, and started again behind a failure.

All workers that run at the same time are a generation. As soon as one of them fails or hangs the others are killed, for
they could only wait for it; the next generation goes on from the newest checkpoint.
"""

import os
import queue
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from moe_jax.errors import EXIT_BAD_INPUT, EXIT_DIVERGED
from moe_jax.launch.places import Places
from moe_jax.launch.watch import FINAL, LOOK_S, STOP_SIGNALS, Watch
from moe_jax.launch.worker import Events, Worker
from moe_jax.train.progress import PROGRAMS

PORTS = 16  # from --port on: a generation may find the one before's still taken
LONGEST_PAUSE_S = 60
TRAINING = "moe_jax.train"  # a module


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started, and how patiently."""

    module: str
    command: Sequence[str]  # arguments of the module
    processes: int
    min_processes: int  # that may go on without the others
    port: int | None  # None: a free one
    grace_s: float
    retries: int
    progress_timeout_s: float
    start_timeout_s: float


class _Ended(NamedTuple):
    """How a generation ended."""

    code: int  # of the launcher, if it ends, too
    told: str = ""  # by the launcher
    failed: int | None = None  # place
    final: bool = True
    reached: int = -1  # steps done


def supervise(launch: Launch) -> int:
    """Run generations until one ends well, or has to end the run; the launcher's exit code.

    They are tried again at most `retries` times until one gets further than all before it; then, if the same process
    failed each time, without that one.
    """
    events: Events = queue.SimpleQueue()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda received, _: events.put((-1, received)))
    places = Places(launch.processes, launch.min_processes)
    tries, furthest = 0, -1
    with tempfile.TemporaryDirectory(prefix="moe_jax_programs_") as programs:
        environ = {PROGRAMS: programs, **os.environ}  # compiled once, not in each generation
        environ.pop("JAX_COORDINATOR_BIND_ADDRESS", None)  # of another address than ours
        for generation in count():
            ended = _run_generation(launch, generation, places, environ, events)
            if ended.reached > furthest:
                tries, furthest = 0, ended.reached
                places.refill()
            if ended.failed is None:
                _say(ended.told)
                return ended.code
            places.blame(ended.failed)
            no_mesh = ended.code == EXIT_BAD_INPUT and places.some_are_missing
            gives_up = ended.final or tries == launch.retries
            if (no_mesh or (gives_up and not ended.final)) and places.leave_out(no_mesh):
                tries = 0
                _say(f"{ended.told or 'no mesh'}: {len(places.used)} of {launch.processes} processes go on")
                continue
            if gives_up:
                _say(f"{ended.told}; gave up after {tries} more tries" if tries and not ended.final else ended.told)
                return ended.code
            tries += 1
            pause_s = min(LONGEST_PAUSE_S, 2 ** (tries - 2)) if tries > 1 else 0
            _say(f"{ended.told}: all start again in {pause_s} s, try {tries} of {launch.retries}")
            if stopped_by := _signal_within(pause_s, events):
                _say(f"stopped by {signal.Signals(stopped_by).name}")
                return 128 + stopped_by
    raise AssertionError("generations never run out")


@contextmanager
def reserved_port(wanted: int = 0) -> Iterator[int]:
    """A port of 127.0.0.1, a free one if none is wanted, that nobody else is given before a worker listens there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the worker does
        try:
            held.bind(("127.0.0.1", wanted))
        except OSError:  # process 0 tells it
            yield wanted
        else:
            yield int(held.getsockname()[1])


def _run_generation(launch: Launch, generation: int, places: Places, environ: dict[str, str], events: Events) -> _Ended:
    workers: list[Worker] = []
    try:
        with reserved_port(launch.port + generation % PORTS if launch.port else 0) as port:
            for rank in range(len(places.used)):
                workers.append(_start(launch, places, rank, port, environ, events))
            watch = Watch(
                workers,
                events,
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
        worker.finish(tell_errors=not everywhere)  # rank 0 has told it for all
    reached = max((worker.reached for worker in workers if worker.reached is not None), default=-1)
    if watch.failed is not None:
        code, rank = watch.failed.code, watch.failed.rank
        told = "" if everywhere else f"rank {rank} {watch.how}"
        return _Ended(code if code > 0 else 128 - code, told, places.used[rank], code in FINAL, reached)
    if watch.stopped_by and any(worker.code for worker in workers):
        told = f"stopped by {signal.Signals(watch.stopped_by).name}"
        if watch.stopped_in_time:
            return _Ended(0, f"{told} before a new step: the same command goes on")
        return _Ended(128 + watch.stopped_by, told)
    return _Ended(0)


def _start(launch: Launch, places: Places, rank: int, port: int, environ: dict[str, str], events: Events) -> Worker:
    meeting = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(len(places.used))]
    command = [*launch.command, *places.overrides(launch.command), *meeting, "--process-id", str(rank)]
    on_gpus = {"JAX_LOCAL_DEVICE_IDS": str(places.used[rank]), **environ}  # one for each process
    return Worker(rank, [sys.executable, "-m", launch.module, *command], on_gpus, events)


def _signal_within(seconds: float, events: Events) -> int:
    """The signal that the launcher gets in that time, or 0."""
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            return events.get(timeout=min(LOOK_S, left_s))[1]
        except queue.Empty:
            pass
    return 0


def _say(text: str) -> None:
    if text:
        print(f"launch: {text}", file=sys.stderr, flush=True)
