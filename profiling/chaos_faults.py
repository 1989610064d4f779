"""Faults for a disturbed run: each function injects one and returns the facts to record.

If the fault made the run roll back to a checkpoint, `at` is the time of that on the monotonic clock.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, NamedTuple

from chaos_poke import Port, listening_ports, process_tree
from chaos_run import DisturbedRun
from results_file import rounded

from moe_jax.checkpoint.files import FOLDER

_TERM_S = 60  # time limit of a run that got SIGTERM before it is signalled again: it may be stopped as well
_SLOW_S, _TURN_S = 5.0, 0.1  # duration of a slow-down, and of each interval in which the process is stopped or runs
_POKE_S = 3.0
_SECOND_S = 120  # time limit for a second run to be refused; imports take most of it
_STEPS_AFTER = 3  # steps to wait for after a fault that should not disturb the run

Strike = Callable[[DisturbedRun, Random, Sequence[int]], dict[str, Any]]


class Kind(NamedTuple):
    """A kind of fault: its function, and when it is injected."""

    strike: Strike
    weight: float  # relative frequency of its draws
    at_starts: bool = False  # may also hit a run that is starting
    before_every: int | None = None  # inserted before every n-th fault of the other kinds instead of drawn


def _signalled(run: DisturbedRun, rng: Random, ranks: Sequence[int], number: signal.Signals) -> dict[str, Any]:
    return {"at": run.signal(number, ranks)}


def _terminated(run: DisturbedRun, rng: Random, ranks: Sequence[int]) -> dict[str, Any]:
    """Send SIGTERM and start the run again after it has ended.

    Processes that are stopped may be replaced before they react; the run then continues.
    """
    at, replaced = run.signal(signal.SIGTERM, ranks), len(run.stretches)
    code = run.wait(_TERM_S)
    if code is None:
        return {"replaced": len(run.stretches) > replaced}
    run.start()
    return {"at": at, "exit_code": code, "exit_s": rounded(time.monotonic() - at)}


def _damaged(run: DisturbedRun, rng: Random, ranks: Sequence[int], how: str) -> dict[str, Any]:
    """Damage a random byte of the latest of two checkpoints, then kill processes."""
    step = run.wait_for_checkpoints(2)[-1]
    files = sorted(path for path in (run.folder / FOLDER / str(step)).rglob("*") if path.is_file())
    file = rng.choices(files, [path.stat().st_size for path in files])[0]
    content = bytearray(file.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content if how == "bit" else content[:place])
    facts = {"checkpoint": step, "file": str(file.relative_to(run.folder / FOLDER / str(step)))}
    return {"at": run.signal(signal.SIGKILL, ranks), **facts}


def _full(run: DisturbedRun, rng: Random, ranks: Sequence[int]) -> dict[str, Any]:
    """Fill the disk, before the next save or in the middle of it, until the run reports that it could not save."""
    assert run.disk is not None
    during = rng.random() < 0.5
    if during:
        run.wait_for(lambda: any((run.folder / FOLDER).glob("*tmp*")), "a save")
    step, before = run.step, len(run.output)

    def failed_saves() -> list[str]:
        return [line for line in run.output[before:] if "was not saved" in line]

    with run.disk.full():
        run.wait_for(lambda: bool(failed_saves()), "a save that fails")
    return {"step": step, "during_a_save": during, "told": failed_saves()[0]}


def _nan(run: DisturbedRun, rng: Random, ranks: Sequence[int]) -> dict[str, Any]:
    """Write NaN into a parameter on the first device of one process."""
    asked = run.faults / f"nan-{ranks[0]}"
    at = time.monotonic()
    asked.touch()
    run.wait_for(lambda: not asked.exists(), f"rank {ranks[0]} to take a NaN")
    return {"at": at}


def _slowed(run: DisturbedRun, rng: Random, ranks: Sequence[int]) -> dict[str, Any]:
    step, processes, until = run.step, run.workers(), time.monotonic() + _SLOW_S
    while time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                with suppress(ProcessLookupError, KeyError):  # the process has ended meanwhile
                    os.kill(processes[rank], number)
            time.sleep(_TURN_S)
    return {"step": step, "steps_meanwhile": run.step - step}


def _poked(run: DisturbedRun, rng: Random, ranks: Sequence[int]) -> dict[str, Any]:
    """Connect to all ports of all processes, for some seconds; connections left open stay so until the next call."""
    before, step = len(run.stretches), run.step
    run.strangers.close()
    found: set[Port] = set()
    connections = 0
    run.wait_for(lambda: bool(listening_ports(process_tree(run.process_id))), "ports to poke at")
    until = time.monotonic() + _POKE_S
    while time.monotonic() < until:
        ports = listening_ports(process_tree(run.process_id))
        found |= ports
        connections += sum(run.strangers.poke(port, rng) for port in sorted(ports))
        time.sleep(_TURN_S)
    facts = {"step": step, "ports": len(found), "connections": connections}
    if step:  # skipped if the run has just been started again
        run.wait_for_step(step + _STEPS_AFTER)
        facts["restarted"] = len(run.stretches) > before
    return facts


def _started_twice(run: DisturbedRun, rng: Random, ranks: Sequence[int]) -> dict[str, Any]:
    """Start the same training in the same folder, which has to be refused."""
    before, step = len(run.stretches), run.step
    code, last_line = run.second(_SECOND_S)
    run.wait_for_step(step + _STEPS_AFTER)
    return {"step": step, "second_exit_code": code, "said": last_line, "restarted": len(run.stretches) > before}


KINDS = {
    "kill": Kind(partial(_signalled, number=signal.SIGKILL), 3, at_starts=True),
    "stop": Kind(partial(_signalled, number=signal.SIGSTOP), 2, at_starts=True),
    "term": Kind(_terminated, 2, at_starts=True),
    "bit": Kind(partial(_damaged, how="bit"), 1),
    "cut": Kind(partial(_damaged, how="cut"), 1),
    "nan": Kind(_nan, 1),
    "full": Kind(_full, 1),
    "slow": Kind(_slowed, 1),
    "poke": Kind(_poked, 1, at_starts=True, before_every=1),
    "second": Kind(_started_twice, 1, before_every=4),
}
