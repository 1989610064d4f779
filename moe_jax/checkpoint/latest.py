"""Agreement of all processes on the checkpoint that they read. If one finds it damaged, all treat it as damaged."""

import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

from moe_jax.checkpoint.files import FOLDER, DamagedError, NoneWholeError, check_files, newest_checkpoint
from moe_jax.checkpoint.record import Record
from moe_jax.checkpoint.storage import storage_of
from moe_jax.distributed.processes import allgather, first_problem, is_main_process
from moe_jax.errors import CheckpointError, OutageError
from moe_jax.files.local_copy import url_of

SHOWN_S = 90  # until all hosts see what one has written: NFS keeps listings of folders for 60
_POLL_S = 1
# what a process has found: no checkpoint, no intact one, or (encoded as _STEP_0 + step) the newest intact one
_NOTHING, _NOTHING_WHOLE, _STEP_0 = range(3)
_WITHOUT = {_NOTHING: "none", _NOTHING_WHOLE: "damaged ones"}


def agreed_newest(run: Path, damaged: MutableMapping[int, str]) -> int | None:
    """Do what `newest_checkpoint` does, with the same result on all processes, which all call it.

    Raises CheckpointError on all of them also if they see different folders, for longer than the listing of a folder
    may be old, and OutageError if one of them cannot read them.
    """
    ends_s, is_waiting = time.monotonic() + (0 if url_of(run) else SHOWN_S), False
    while True:
        newest, problem, unreadable = None, None, None
        try:
            newest = newest_checkpoint(run, damaged)
        except NoneWholeError as error:
            problem = error
        except CheckpointError as error:
            unreadable = error
        _raise_on_all(run, unreadable)
        found = allgather(_NOTHING_WHOLE if problem else _NOTHING if newest is None else _STEP_0 + newest)
        if len(set(found)) == 1:
            if problem:
                raise problem
            return newest
        step = max(found) - _STEP_0
        if step >= 0 and (reason := first_problem(damaged.get(step, ""))) and all(allgather(_has(run, step))):
            damaged.setdefault(step, reason)
            continue
        steps = ", ".join(str(_WITHOUT.get(each) or each - _STEP_0) for each in found)
        differ = f"{run / FOLDER} is not the same on all processes (they find steps {steps})"
        if any(allgather(time.monotonic() > ends_s)):
            raise CheckpointError(f"{differ}: put log.dir on a disk that all share")
        if not is_waiting and is_main_process():
            print(f"{differ}: looking again for up to {SHOWN_S} s", file=sys.stderr, flush=True)
        is_waiting = True
        time.sleep(_POLL_S)


def _has(run: Path, step: int) -> bool:
    try:
        return storage_of(run).has(step)
    except OSError:
        return False


def agreed_record(run: Path, step: int) -> Record:
    """Check a step's files and return its record; all processes call it. If one fails, all raise its error, a
    DamagedError or an OutageError.
    """
    record, damage, unreadable = None, "", None
    try:
        record = check_files(run, step)
    except DamagedError as error:
        damage = str(error)
    except CheckpointError as error:
        unreadable = error
    _raise_on_all(run, unreadable)
    if (problem := first_problem(damage)) or record is None:
        raise DamagedError(problem)
    return record


def _raise_on_all(run: Path, unreadable: CheckpointError | None) -> None:
    """Raise on all processes if one of them cannot read the checkpoints; all call it."""
    if problem := first_problem(str(unreadable or "")):
        raise unreadable or OutageError(f"{run / FOLDER}: {problem}")
