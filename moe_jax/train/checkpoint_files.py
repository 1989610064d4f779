"""The files of a run's checkpoints: which there are, and whether they are whole."""

import itertools
import json
from pathlib import Path

import tensorstore

from moe_jax.errors import CheckpointError

FOLDER = "checkpoints"


def newest_checkpoint(run: Path) -> int | None:
    """The step of the newest complete checkpoint below a run's folder; touches nothing.

    Raises CheckpointError if one of its files is missing, cut short, or not what orbax writes.
    """
    folder = run / FOLDER
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: remove it, or use another log.dir")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}): use another log.dir") from None
    step = max(_steps(run), default=None)
    if step is not None:
        try:
            _check_files(folder / str(step))
        except ValueError as error:
            raise _damaged(run, step, error) from error
    return step


def saved_slots(run: Path, step: int) -> int | None:
    """In how many slots of a block the experts of a checkpoint lie as its own placement says; None: in their order.

    Raises CheckpointError.
    """
    folder = run / FOLDER / str(step) / "state"
    try:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}).result()
        for name, file in itertools.product(("slot_ME", "expert_MS"), (".zarray", "zarr.json")):  # of zarr 2 and 3
            found = store.read(f"placement.{name}/{file}").result()
            if found.state == "value":
                return int(json.loads(found.value)["shape"][1])
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(run, step, error) from error
    return None


def check_slots(run: Path, step: int, ranks: int) -> None:
    """Raise CheckpointError if so many expert ranks cannot share what the experts of a checkpoint lie in."""
    slots = saved_slots(run, step) or 0
    if slots % ranks:
        raise CheckpointError(
            f"mesh: {ranks} expert ranks cannot share the {slots} slots that experts and their copies have in "
            f"log.dir={run}: use a mesh whose expert ranks divide {slots}, or another log.dir"
        )


def _steps(run: Path) -> list[int]:
    return [int(p.name) for p in (run / FOLDER).glob("*") if p.name.isdigit() and p.is_dir()]


def _check_files(checkpoint: Path) -> None:
    """Raise ValueError unless every file that the checkpoint's indices name is there in its full length.

    Restoring would fail as well, but in many threads at once, each of which prints its stack.
    """
    for name in ("state/_METADATA", "data/metadata"):
        _require(checkpoint, name, 1)
        try:
            json.loads((checkpoint / name).read_bytes())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    _require(checkpoint, "state/manifest.ocdbt", 1)
    store = tensorstore.KvStore.open(f"file://{(checkpoint / 'state').absolute()}/").result()
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


def _extent(location: str) -> tuple[str, int]:
    """The file of a `kind:folder:name:offset:length`, and the bytes that it must have for it."""
    _, folder, name, offset, length = location.split(":")
    return f"state/{folder}{name}", int(offset) + int(length)


def _require(checkpoint: Path, name: str, size: int) -> None:
    file = checkpoint / name
    if not file.is_file():
        raise ValueError(f"{name} is missing")
    if file.stat().st_size < size:
        raise ValueError(f"{name} has {file.stat().st_size} of {size} bytes")


def _damaged(run: Path, step: int, error: Exception) -> CheckpointError:
    older = max((other for other in _steps(run) if other < step), default=None)
    cure = "start again" if older is None else f"go on from step {older}"
    folder = run / FOLDER / str(step)
    return CheckpointError(f"checkpoint {folder} is damaged ({first_line(error)}): delete that folder to {cure}")


def first_line(error: Exception) -> str:
    """What an error of orbax or tensorstore says first, without the description of the store behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(" [")[0][:200]
