"""The files of a run's checkpoints: listing them, checking that they are complete, and moving damaged ones away."""

import itertools
import re
from collections.abc import MutableMapping
from pathlib import Path

import tensorstore

from moe_jax.checkpoint.record import Record, read_record
from moe_jax.checkpoint.storage import COMMITTED, Storage, storage_of
from moe_jax.errors import CheckpointError, OutageError
from moe_jax.files.local_copy import CHECKPOINTS as FOLDER
from moe_jax.files.object_store import is_outage
from moe_jax.files.untrusted import parse_json, read_json
from moe_jax.measure.provenance import PROVENANCE

QUARANTINE = "quarantine"  # below the checkpoints
STATE = "state"  # the item's folder in a checkpoint
COMMIT_TIME = "commit_timestamp_nsecs"  # in the file with the commit mark
BY_ORBAX = "item_handlers"  # in that file, if orbax has written it


class NoneWholeError(CheckpointError):
    """There are checkpoints, and all of them are damaged."""


class DamagedError(Exception):
    """A checkpoint differs from what was saved. The message is the reason; callers print it in brackets."""


def newest_checkpoint(run: Path, damaged: MutableMapping[int, str] | None = None) -> int | None:
    """Return the step of the newest intact checkpoint below a run's folder, or None if there are no checkpoints.

    Only the presence and sizes of files are checked. `damaged` maps steps to skip to the reasons; steps that are found
    damaged here are added. Raises NoneWholeError if there are checkpoints and none is intact, and CheckpointError if
    they cannot be read.
    """
    damaged = {} if damaged is None else damaged
    steps = steps_of(run)
    for step in steps:
        if step not in damaged:
            try:
                check_files(run, step)
                return step
            except DamagedError as error:
                damaged[step] = str(error)
    if steps:
        found = "; ".join(f"{step}: {damaged[step]}" for step in steps)
        raise NoneWholeError(
            f"no checkpoint in {run / FOLDER} is whole ({found}): use another log.dir, or move them away to start again"
        )
    return None


def check_files(run: Path, step: int) -> Record:
    """Return the record of a step's checkpoint. Raises DamagedError unless all its files exist in full length.

    Raises OutageError if they cannot be read for the moment.
    """
    storage = storage_of(run)
    try:
        _check_commit(storage, step)
        record = read_record(storage, step)
        if record.step != step:
            raise ValueError(f"it holds step {record.step}")
        here = saved_run_id(run)
        if here and record.run and record.run != here:
            raise ValueError(f"it is of another run, {record.run}, and {PROVENANCE} has {here}")
        _check_arrays(storage, step)
    except Exception as error:  # tensorstore's errors have no common type
        if is_outage(error):
            raise OutageError(outage_message(run, step, first_line(error))) from None
        raise DamagedError(first_line(error)) from error
    return record


def outage_message(run: Path, step: int, reason: str) -> str:
    """Say that a checkpoint cannot be read for the moment, so that it is not known to be damaged."""
    return f"checkpoint {run / FOLDER / str(step)} cannot be read now ({reason}): run the same command again"


def saved_run_id(folder: Path) -> str:
    """Read the ID of the run in a folder; "" if the folder has none."""
    try:
        found = read_json(folder / PROVENANCE)["run"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return found if isinstance(found, str) else ""


def first_line(error: Exception) -> str:
    """Return the first line of an error of orbax or tensorstore, without the description of the store that follows."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0].partition(" [")[0][:200]
    if "TensorStore" in line:  # it has only a position in an array and names of C++ functions
        return "some of its numbers cannot be read"
    return line


def steps_of(run: Path) -> list[int]:
    """List the steps of a run's checkpoints, newest first. Raises CheckpointError if their folder cannot be read."""
    found = storage_of(run).folders()
    return sorted((int(name) for name in found if re.fullmatch(r"0|[1-9][0-9]*", name)), reverse=True)


def _check_commit(storage: Storage, step: int) -> None:
    """Raise ValueError unless the checkpoint was committed."""
    if not isinstance(_json(storage, step, COMMITTED).get(COMMIT_TIME), int):
        raise ValueError("it was not committed")


def _check_arrays(storage: Storage, step: int) -> None:
    """Raise ValueError unless every file that the arrays' indices name exists in its full length.

    This check decides from which step a run resumes, before any array is read.
    """
    if BY_ORBAX in _json(storage, step, COMMITTED):
        _json(storage, step, f"{STATE}/_METADATA")
    storage.require(f"{step}/{STATE}/manifest.ocdbt", 1)
    store = tensorstore.KvStore.open(storage.spec(f"{step}/{STATE}")).result()
    nodes = [tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]]
    sizes: dict[str, int] = {}
    while nodes:
        name, size = _extent(nodes[-1])
        storage.require(f"{step}/{name}", size)
        for entry in tensorstore.ocdbt.dump(store, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                name, size = _extent(entry["indirect_value"])
                sizes[name] = max(size, sizes.get(name, 0))
    for name in sorted(sizes):
        storage.require(f"{step}/{name}", sizes[name])


def _json(storage: Storage, step: int, name: str) -> dict[str, object]:
    storage.require(f"{step}/{name}", 1)
    try:
        found = parse_json(storage.read(f"{step}/{name}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no JSON object")
    return found


def _extent(location: str) -> tuple[str, int]:
    """Return the file of a location `kind:folder:name:offset:length`, and its least possible size in bytes."""
    _, folder, name, offset, length = location.split(":")
    return f"{STATE}/{folder}{name}", int(offset) + int(length)


def quarantine(run: Path, step: int, reason: str) -> str:
    """Move a checkpoint to the quarantine folder, add the reason to its files, and return its new path.

    Raises CheckpointError if it cannot be moved.
    """
    storage = storage_of(run)
    names = itertools.chain([str(step)], (f"{step}.{number}" for number in itertools.count(2)))
    try:
        target = next(each for each in (f"{QUARANTINE}/{name}" for name in names) if not storage.is_taken(each))
        return storage.move(step, target, reason)
    except OSError as error:
        checkpoint, home = run / FOLDER / str(step), run / FOLDER / QUARANTINE
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged ({reason}) and cannot be moved to {home} ({error.strerror}): "
            "move it away yourself, or use another log.dir"
        ) from None
