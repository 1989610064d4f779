"""Reading the arrays of a checkpoint, and checking them against the digests that were saved with them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from numpy.typing import NDArray

from moe_jax.checkpoint.checksums import digest_program, names_of
from moe_jax.checkpoint.files import FOLDER, STATE, DamagedError, first_line, outage_message
from moe_jax.checkpoint.record import ArrayRecord, Record
from moe_jax.checkpoint.storage import storage_of
from moe_jax.distributed.processes import allgather, first_problem
from moe_jax.errors import CheckpointError, OutageError
from moe_jax.files.object_store import is_outage
from moe_jax.step.compile_cache import compiled

_READERS = 8  # threads; each reads one array at a time
_OUTAGE = 2  # what a process reports that could not read; 1: that has read damaged arrays


def array_records(state: Any, digests: Any) -> dict[str, ArrayRecord]:
    """Describe the arrays of a state for a checkpoint's record; `digests` has shape [L, 2] for L arrays."""
    return {
        name: ArrayRecord(tuple(leaf.shape), str(leaf.dtype), (int(first), int(second)))
        for name, leaf, (first, second) in zip(
            names_of(state), jax.tree.leaves(state), np.asarray(digests), strict=True
        )
    }


def read_arrays(run: Path, record: Record, shapes: Any) -> Any:
    """Read a part of a checkpoint's state onto the devices, with the shardings of `shapes`; all processes call it.

    Raises CheckpointError if the arrays belong to another model, OutageError if they cannot be read now, and
    DamagedError if they differ from what was saved.
    """
    _check_shapes(run, record, shapes)
    base = storage_of(run).spec(f"{record.step}/{STATE}")
    found, problem, outage = None, "", False
    try:
        found = _read(base, shapes)
    except Exception as error:  # tensorstore's errors have no common type
        problem, outage = first_line(error), is_outage(error)
    failed = allgather(_OUTAGE if outage else int(found is None))
    if _OUTAGE in failed:
        raise OutageError(outage_message(run, record.step, first_problem(problem if outage else "")))
    if any(failed):
        raise DamagedError(first_problem(problem))
    digests = jax.device_get(compiled(digest_program(shapes).lower(shapes))(found))
    leaves = array_records(found, digests)
    wrong = next((name for name, leaf in leaves.items() if leaf.digest != record.leaves[name].digest), None)
    if problem := first_problem(f"{wrong} is not what was saved: its digest differs" if wrong else ""):
        raise DamagedError(problem)
    return found


def _check_shapes(run: Path, record: Record, shapes: Any) -> None:
    """Raise CheckpointError unless the checkpoint has arrays of these names, types and shapes. None is ever cast."""
    here = {
        name: f"{x.dtype}{list(x.shape)}" for name, x in zip(names_of(shapes), jax.tree.leaves(shapes), strict=True)
    }
    there = {name: str(leaf) for name, leaf in record.leaves.items() if name.partition(".")[0] in shapes}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"the checkpoint {run / FOLDER / str(record.step)} has {there.get(name, 'none')} as {name}, and this "
                f"run {here.get(name, 'none')}: use the settings that it was made with, or another log.dir"
            )


def _read(base: dict[str, Any], shapes: Any) -> Any:
    """Read arrays with tensorstore directly from the folder that `base` describes.

    orbax would cast types silently, and its threads print the stack traces of errors that it also raises.
    """
    context = tensorstore.Context()

    def read(name: str, wanted: Any) -> jax.Array:
        store = tensorstore.open(
            {"driver": "auto", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}},
            context=context,
            read=True,
        ).result()
        if (store.shape, store.dtype.numpy_dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(f"{name} is {store.dtype.name}{list(store.shape)} in its file")
        shards: dict[str, NDArray[Any]] = {}

        def shard(index: tuple[slice, ...] | None) -> NDArray[Any]:
            """Read a shard once for all devices that store it."""
            if str(index) not in shards:
                shards[str(index)] = store[index].read().result()
            return shards[str(index)]

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)

    with ThreadPoolExecutor(_READERS) as pool:
        return jax.tree.unflatten(jax.tree.structure(shapes), pool.map(read, names_of(shapes), jax.tree.leaves(shapes)))
