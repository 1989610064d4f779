"""What a checkpoint says of itself: its step, the digest of each array, and all of a run that is no array."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_jax.checkpoint.checksums import Digest
from moe_jax.files.untrusted import read_json

RECORD = "record"  # the item's folder in a checkpoint


@dataclass(frozen=True)
class ArrayRecord:
    """One array of the training state."""

    shape: tuple[int, ...]
    dtype: str
    digest: Digest

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Plain values only."""

    step: int
    leaves: Mapping[str, ArrayRecord]  # by name
    data: Mapping[str, Any]  # where the batches go on
    config: Mapping[str, Any]  # of the run, all settings
    mesh: Mapping[str, int]  # for readers, as are the versions
    versions: Mapping[str, str | None]
    tuner: Mapping[str, Any] | None = None  # the search of settings under way
    run: str | None = None  # see run/identity.py; None, as the next: of an older version, or of an imported model
    text: Mapping[str, Any] | None = None
    recent_losses: Sequence[tuple[int, float]] = ()  # of steps, by which the next ones are told to jump

    @property
    def slots(self) -> int | None:
        """In how many slots of a block the experts lie as the state's own placement says; None: in their order."""
        found = (self.leaves.get(f"placement.{name}") for name in ("slot_ME", "expert_MS"))
        return next((leaf.shape[1] for leaf in found if leaf), None)

    def to_json(self) -> dict[str, Any]:
        """With a checksum of its own."""
        content = json.loads(json.dumps(dataclasses.asdict(self)))  # as it is read again: lists for tuples
        return {"crc32": _crc32(content), "content": content}

    @classmethod
    def from_json(cls, found: Any) -> "Record":
        """Raises ValueError, KeyError, TypeError or AttributeError if it is damaged."""
        content = found["content"]
        if found["crc32"] != _crc32(content):
            raise ValueError("its checksum is another")
        leaves = {
            name: ArrayRecord(tuple(leaf["shape"]), leaf["dtype"], tuple(leaf["digest"]))
            for name, leaf in content["leaves"].items()
        }
        return cls(**content | {"leaves": leaves})


def read_record(checkpoint: Path) -> Record:
    """Of a checkpoint's folder. Raises ValueError if it is missing or damaged."""
    name = f"{RECORD}/metadata"
    try:
        return Record.from_json(read_json(checkpoint / name))
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
