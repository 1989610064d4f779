"""The files in which a process stores pieces of the training state: two slots, of which one is always complete.

They are in a memory file system, where they outlive the process. A slot is a file of numbers, which is rewritten in
place, and a JSON file, which exists only while the numbers are complete.
"""

import errno
import itertools
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_jax.checkpoint.record import Record
from moe_jax.files.atomic import is_private_folder, write_atomically
from moe_jax.files.untrusted import read_json

_WRITERS = 4  # threads
_MAX_WRITE = 2**30  # bytes of one write; Linux accepts less than 2³¹


@dataclass(frozen=True)
class ReplicaFile:
    """A complete slot: a file of numbers, and what its JSON file says of it."""

    path: Path  # of the file of numbers
    run: int  # the random number of the run that wrote it
    is_recorded: bool  # whether metrics.jsonl has a record of its step
    record: Record
    checksum: int  # of the record
    offsets: Mapping[str, int]  # in the file, of each piece, in bytes

    def read(self, piece: str, num_bytes: int) -> NDArray[np.uint8]:
        """Read a copy of a piece as bytes, as the file will be rewritten. Raises OSError or ValueError."""
        found = np.fromfile(self.path, np.uint8, num_bytes, offset=self.offsets[piece])
        if found.size < num_bytes:
            raise ValueError(f"{self.path} is too short")
        return found


def whole_slots(folder: Path) -> list[ReplicaFile]:
    """List the complete slots of all processes of this node."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.exists() and is_private_folder(folder) else ():
        # damaged JSON files are skipped
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = read_json(path)
            found.append(
                ReplicaFile(
                    path=path.with_suffix(".bin"),
                    run=content["run"],
                    is_recorded=content["is_recorded"],
                    record=Record.from_json(content["record"]),
                    checksum=content["record"]["crc32"],
                    offsets=content["offsets"],
                )
            )
    return found


class SlotFiles:
    """The two slots of one process; `place` is its number among the processes of its node.

    Making them allocates their memory. Raises OSError, and then leaves no new files.
    """

    def __init__(self, folder: Path, place: int, sizes: Mapping[str, int], keep: Collection[Path]) -> None:
        """`keep` are files of numbers that must not be overwritten yet, at most one of this process.

        `sizes` are those of the pieces, in bytes.
        """
        self._paths = [folder / f"{place}.{slot}.bin" for slot in range(2)]
        self._offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self._pool = ThreadPoolExecutor(_WRITERS)
        self._files: list[int] = []
        is_in_use = [path in keep for path in self._paths]
        self._next = int(is_in_use[0])  # the slot to write next; the other one is not changed
        self._new = [path for path in self._paths if not path.exists()]
        try:
            _make_own(folder.parent)
            _make_own(folder)
            for slot, path in enumerate(self._paths):
                if not is_in_use[slot]:
                    self._invalidate(slot)
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
                if not is_in_use[slot]:
                    os.ftruncate(self._files[-1], sum(sizes.values()))
                os.posix_fallocate(self._files[-1], 0, max(1, sum(sizes.values())))
        except OSError:
            self.close()
            self.remove_new()
            raise

    def begin(self) -> None:
        """Begin to write the next step: its slot becomes invalid."""
        self._invalidate(self._next)

    def write(self, arrays: Mapping[str, Any]) -> None:
        """Write pieces, copying them to the host concurrently; return when they are written. Raises OSError."""
        file = self._files[self._next]
        list(self._pool.map(lambda item: _write_at(file, item[1], self._offsets[item[0]]), arrays.items()))

    def end(self, run: int, record: Record, is_recorded: bool) -> None:
        """Make the slot valid, once all pieces are written. Raises OSError."""
        content = {"run": run, "is_recorded": is_recorded, "record": record.to_json(), "offsets": self._offsets}
        write_atomically(self._paths[self._next].with_suffix(".json"), json.dumps(content))

    def swap(self) -> None:
        """Write the next step to the other slot; call it once this one is complete on all processes."""
        self._next = 1 - self._next

    def invalidate(self) -> None:
        """Make both slots invalid."""
        for slot in range(2):
            self._invalidate(slot)

    def remove_new(self) -> None:
        """Remove the files that did not exist before, and their folders if nothing else is in them."""
        for path in self._new:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # a folder is not empty
            self._paths[0].parent.rmdir()
            self._paths[0].parent.parent.rmdir()

    def close(self) -> None:
        """Close the files; nothing can be written afterwards. Closing them again has no effect."""
        self._pool.shutdown()
        while self._files:
            os.close(self._files.pop())

    def _invalidate(self, slot: int) -> None:
        self._paths[slot].with_suffix(".json").unlink(missing_ok=True)


def _make_own(folder: Path) -> None:
    """Make a private folder below one that others can write. Raises OSError if another user has made a folder there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private_folder(folder):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(folder))


def _write_at(file: int, array: Any, offset: int) -> None:
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(file, left[:_MAX_WRITE], offset)
        left, offset = left[written:], offset + written
