"""Agreement of all processes on the checkpoint that they read. If one finds it damaged, all treat it as damaged."""

from collections.abc import MutableMapping
from pathlib import Path

from moe_jax.checkpoint.files import FOLDER, DamagedError, check_files, newest_checkpoint
from moe_jax.checkpoint.record import Record
from moe_jax.checkpoint.storage import storage_of
from moe_jax.distributed.processes import allgather
from moe_jax.errors import CheckpointError

_ELSEWHERE = "another process cannot read it"
# what a process has found: no checkpoint, no intact one, or (encoded as _STEP_0 + step) the newest intact one
_NOTHING, _NOTHING_WHOLE, _STEP_0 = range(3)
_WITHOUT = {_NOTHING: "none", _NOTHING_WHOLE: "damaged ones"}


def agreed_newest(run: Path, damaged: MutableMapping[int, str]) -> int | None:
    """Do what `newest_checkpoint` does, with the same result on all processes, which all call it.

    Raises CheckpointError on all of them also if they see different folders.
    """
    while True:
        newest, problem = None, None
        try:
            newest = newest_checkpoint(run, damaged)
        except CheckpointError as error:
            problem = error
        own = _NOTHING_WHOLE if problem else _NOTHING if newest is None else _STEP_0 + newest
        found = allgather(own)
        if len(set(found)) == 1:
            if problem:
                raise problem
            return newest
        step = max(found) - _STEP_0
        if step < 0 or not all(allgather(storage_of(run).has(step))):
            steps = [_WITHOUT.get(each) or each - _STEP_0 for each in found]
            raise CheckpointError(
                f"{run / FOLDER} is not the same on all processes (they find steps {', '.join(map(str, steps))}): "
                "put log.dir on a disk that all share"
            )
        damaged.setdefault(step, _ELSEWHERE)


def agreed_record(run: Path, step: int) -> Record:
    """Check a step's files and return its record; all processes call it. If one fails, all raise DamagedError."""
    record, problem = None, _ELSEWHERE
    try:
        record = check_files(run, step)
    except DamagedError as error:
        problem = str(error)
    if any(allgather(record is None)) or record is None:
        raise DamagedError(problem)
    return record
