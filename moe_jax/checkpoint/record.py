"""The record in a checkpoint: its step, the digest of each array, and all state of a run that is not an array. A run
resumes with a state and its record.
"""

import dataclasses
import errno
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from moe_jax.checkpoint.checksums import Digest
from moe_jax.files.object_store import is_outage
from moe_jax.files.untrusted import parse_json
from moe_jax.step.context import State

METADATA = "record/metadata"  # the file of the item `record` in a checkpoint


@dataclass(frozen=True)
class ArrayRecord:
    """Shape, type and digest of one array of the training state."""

    shape: tuple[int, ...]
    dtype: str
    digest: Digest

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one checkpoint; it has plain values only, so that it can be saved as JSON."""

    step: int
    leaves: Mapping[str, ArrayRecord]  # by name
    data: Mapping[str, Any]  # the position in the data from which batches continue
    config: Mapping[str, Any]  # all settings of the run
    mesh: Mapping[str, int]  # sizes of its axes; this and the versions are for information only
    versions: Mapping[str, str | None]
    tuner: Mapping[str, Any] | None = None  # the state of a search for settings that has not ended
    run: str | None = (
        None  # see run/identity.py. This and `text` are None in records of older versions and of imported models
    )
    text: Mapping[str, Any] | None = None
    recent_losses: Sequence[
        tuple[int, float]
    ] = ()  # (step, loss), with which later losses are compared to detect jumps

    @property
    def slots(self) -> int | None:
        """Positions of experts per block, if the state has a placement of its own; None: experts are in their order."""
        found = (self.leaves.get(f"placement.{name}") for name in ("slot_ME", "expert_MS"))
        return next((leaf.shape[1] for leaf in found if leaf), None)

    def to_json(self) -> dict[str, Any]:
        """Return the record for JSON, with its own checksum."""
        content = json.loads(json.dumps(dataclasses.asdict(self)))  # as it will be read: with lists instead of tuples
        return {"crc32": _crc32(content), "content": content}

    @classmethod
    def from_json(cls, found: Any) -> "Record":
        """Make a record from JSON. Raises ValueError, KeyError, TypeError or AttributeError if it is damaged."""
        content = found["content"]
        if found["crc32"] != _crc32(content):
            raise ValueError("its checksum is another")
        leaves = {
            name: ArrayRecord(tuple(leaf["shape"]), leaf["dtype"], tuple(leaf["digest"]))
            for name, leaf in content["leaves"].items()
        }
        return cls(**content | {"leaves": leaves})


class Readable(Protocol):
    """The files of a run's checkpoints, of which one can be read."""

    def read(self, name: str) -> bytes: ...


def read_record(storage: Readable, step: int) -> Record:
    """Read the record of a step's checkpoint.

    Raises ValueError if it is missing or damaged, and OSError if it cannot be read for the moment.
    """
    name = METADATA
    try:
        return Record.from_json(parse_json(storage.read(f"{step}/{name}")))
    except OSError as error:
        if is_outage(error):
            raise
        reason = " is missing" if error.errno == errno.ENOENT else f": {error.strerror}"
        raise ValueError(f"{name}{reason}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class Restored(NamedTuple):
    """A restored state, and its source: a checkpoint on disk, or safety copies in the memory of nodes."""

    state: State
    record: Record
    source: str = ""  # a description of the source, if there was a choice
    run_id: int = 0  # the number of the run that made the safety copies; 0: the state is from a checkpoint
    files: frozenset[Path] = frozenset()  # safety copies on this node from which it was restored
    is_validated: bool = True  # whether validation after this step, if due, is done; it may not be after safety copies
