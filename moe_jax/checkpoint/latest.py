"""Which checkpoint of a run its processes read: the same on all of them. What one finds damaged is damaged for all."""

from collections.abc import MutableMapping
from pathlib import Path

from moe_jax.checkpoint.files import FOLDER, DamagedError, check_files, newest_checkpoint
from moe_jax.checkpoint.record import Record
from moe_jax.distributed.processes import allgather
from moe_jax.errors import CheckpointError

_ELSEWHERE = "another process cannot read it"
# what a process has: no checkpoint, none that is whole, or this plus a step
_NOTHING, _NOTHING_WHOLE, _STEP_0 = range(3)
_WITHOUT = {_NOTHING: "none", _NOTHING_WHOLE: "damaged ones"}


def agreed_newest(run: Path, damaged: MutableMapping[int, str]) -> int | None:
    """As `newest_checkpoint`; all processes call it. Raises CheckpointError on all, too, if they see other folders."""
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
        if step < 0 or not all(allgather((run / FOLDER / str(step)).is_dir())):
            steps = [_WITHOUT.get(each) or each - _STEP_0 for each in found]
            raise CheckpointError(
                f"{run / FOLDER} is not the same on all processes (they find steps {', '.join(map(str, steps))}): "
                "put log.dir on a disk that all share"
            )
        damaged.setdefault(step, _ELSEWHERE)


def agreed_record(run: Path, step: int) -> Record:
    """The record of a step whose files are whole; all processes call it. Raises DamagedError on all if one fails."""
    record, problem = None, _ELSEWHERE
    try:
        record = check_files(run, step)
    except DamagedError as error:
        problem = str(error)
    if any(allgather(record is None)) or record is None:
        raise DamagedError(problem)
    return record
