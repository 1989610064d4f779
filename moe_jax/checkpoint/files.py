"""The files of a run's checkpoints: listing them, and checking that they are complete. Nothing is changed here."""

import re
from collections.abc import MutableMapping
from pathlib import Path

import tensorstore

from moe_jax.checkpoint.record import Record, read_record
from moe_jax.errors import CheckpointError
from moe_jax.files.untrusted import read_json
from moe_jax.measure.provenance import PROVENANCE

FOLDER = "checkpoints"
STATE = "state"  # the item's folder in a checkpoint
_COMMITTED = "_CHECKPOINT_METADATA"  # orbax's file with the time of the commit


def checkpoints_dir(run: Path) -> Path:
    """Return the folder of a run's checkpoints in the form that tensorstore and orbax need: absolute, without `..`."""
    return (run / FOLDER).resolve()


class DamagedError(Exception):
    """A checkpoint differs from what was saved. The message is the reason; callers print it in brackets."""


def newest_checkpoint(run: Path, damaged: MutableMapping[int, str] | None = None) -> int | None:
    """Return the step of the newest intact checkpoint below a run's folder, or None if there are no checkpoints.

    Only the presence and sizes of files are checked. `damaged` maps steps to skip to the reasons; steps that are found
    damaged here are added. Raises CheckpointError if there are checkpoints and none is intact.
    """
    damaged = {} if damaged is None else damaged
    steps = _steps(run)
    for step in steps:
        if step not in damaged:
            try:
                check_files(run, step)
                return step
            except DamagedError as error:
                damaged[step] = str(error)
    if steps:
        found = "; ".join(f"{step}: {damaged[step]}" for step in steps)
        raise CheckpointError(
            f"no checkpoint in {run / FOLDER} is whole ({found}): use another log.dir, or move them away to start again"
        )
    return None


def check_files(run: Path, step: int) -> Record:
    """Return the record of a step's checkpoint. Raises DamagedError unless all its files exist in full length."""
    checkpoint = checkpoints_dir(run) / str(step)
    try:
        _check_commit(checkpoint)
        record = read_record(checkpoint)
        if record.step != step:
            raise ValueError(f"it holds step {record.step}")
        here = saved_run_id(run)
        if here and record.run and record.run != here:
            raise ValueError(f"it is of another run, {record.run}, and {PROVENANCE} has {here}")
        _check_arrays(checkpoint)
    except Exception as error:  # tensorstore's errors have no common type
        raise DamagedError(first_line(error)) from error
    return record


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


def _steps(run: Path) -> list[int]:
    """List the steps of a run's checkpoints, newest first. Raises CheckpointError if their folder cannot be read."""
    folder = run / FOLDER
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: remove it, or use another log.dir")
        found = [path.name for path in folder.glob("*") if path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}): use another log.dir") from None
    return sorted((int(name) for name in found if re.fullmatch(r"0|[1-9][0-9]*", name)), reverse=True)


def _check_commit(checkpoint: Path) -> None:
    """Raise ValueError unless orbax has committed the checkpoint."""
    if not isinstance(_json(checkpoint, _COMMITTED).get("commit_timestamp_nsecs"), int):
        raise ValueError("it was not committed")


def _check_arrays(checkpoint: Path) -> None:
    """Raise ValueError unless every file that the arrays' indices name exists in its full length.

    This check decides from which step a run resumes, before any array is read.
    """
    _json(checkpoint, f"{STATE}/_METADATA")
    _require(checkpoint, f"{STATE}/manifest.ocdbt", 1)
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{checkpoint / STATE}/"}).result()
    nodes = [tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]]
    sizes: dict[str, int] = {}
    while nodes:
        name, size = _extent(nodes[-1])
        _require(checkpoint, name, size)
        for entry in tensorstore.ocdbt.dump(store, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                name, size = _extent(entry["indirect_value"])
                sizes[name] = max(size, sizes.get(name, 0))
    for name in sorted(sizes):
        _require(checkpoint, name, sizes[name])


def _json(checkpoint: Path, name: str) -> dict[str, object]:
    _require(checkpoint, name, 1)
    try:
        found = read_json(checkpoint / name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no JSON object")
    return found


def _extent(location: str) -> tuple[str, int]:
    """Return the file of a location `kind:folder:name:offset:length`, and its least possible size in bytes."""
    _, folder, name, offset, length = location.split(":")
    return f"{STATE}/{folder}{name}", int(offset) + int(length)


def _require(checkpoint: Path, name: str, size: int) -> None:
    file = checkpoint / name
    if not file.is_file():
        raise ValueError(f"{name} is missing")
    if file.stat().st_size < size:
        raise ValueError(f"{name} has {file.stat().st_size} of {size} bytes")
