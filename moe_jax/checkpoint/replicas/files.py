"""The files in which a process keeps pieces of the training state: two slots, of which one is always whole.

They lie in a memory file system, where they outlive the process. A slot is a file of numbers, rewritten in place, and a
description that is there only while the numbers are whole.
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
from moe_jax.files.atomic import is_own, write_atomically
from moe_jax.files.untrusted import read_json

_WRITERS = 4  # threads
_MOST = 2**30  # bytes of one write; Linux takes no more than 2³¹


@dataclass(frozen=True)
class ReplicaFile:
    """A whole one."""

    path: Path  # of its numbers
    run: int  # a number that the run was given
    is_recorded: bool  # whether metrics.jsonl gets a record of its step
    record: Record
    checksum: int  # of the record
    offsets: Mapping[str, int]  # of each piece

    def read(self, piece: str, num_bytes: int) -> NDArray[np.uint8]:
        """Raises OSError or ValueError. A copy: the file will be written again."""
        found = np.fromfile(self.path, np.uint8, num_bytes, offset=self.offsets[piece])
        if found.size < num_bytes:
            raise ValueError(f"{self.path} is too short")
        return found


def whole_slots(folder: Path) -> list[ReplicaFile]:
    """Of all processes of this node."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.exists() and is_own(folder) else ():
        # what is damaged is none
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
    """The two slots of one process, which `place` tells from others of its node.

    Making them takes the room that they need. Raises OSError, and then leaves no new files.
    """

    def __init__(self, folder: Path, place: int, sizes: Mapping[str, int], keep: Collection[Path]) -> None:
        """`keep` are files of numbers that stay for now, at most one of this process."""
        self._paths = [folder / f"{place}.{slot}.bin" for slot in range(2)]
        self._offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self._pool = ThreadPoolExecutor(_WRITERS)
        self._files: list[int] = []
        kept = [path in keep for path in self._paths]
        self._next = int(kept[0])  # slot to write; the other one stays
        self._new = [path for path in self._paths if not path.exists()]
        try:
            _make_own(folder.parent)
            _make_own(folder)
            for slot, path in enumerate(self._paths):
                if not kept[slot]:
                    self._forget(slot)
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
                if not kept[slot]:
                    os.ftruncate(self._files[-1], sum(sizes.values()))
                os.posix_fallocate(self._files[-1], 0, max(1, sum(sizes.values())))
        except OSError:
            self.close()
            self.remove_new()
            raise

    def begin(self) -> None:
        """Begin to write the next step."""
        self._forget(self._next)

    def write(self, arrays: Mapping[str, Any]) -> None:
        """Write pieces, which are brought to the host meanwhile; returns when they are written. Raises OSError."""
        file = self._files[self._next]
        list(self._pool.map(lambda item: _write_at(file, item[1], self._offsets[item[0]]), arrays.items()))

    def end(self, run: int, record: Record, is_recorded: bool) -> None:
        """All is written. Raises OSError."""
        content = {"run": run, "is_recorded": is_recorded, "record": record.to_json(), "offsets": self._offsets}
        write_atomically(self._paths[self._next].with_suffix(".json"), json.dumps(content))

    def turn(self) -> None:
        """The next step goes to the other slot: this one is whole everywhere."""
        self._next = 1 - self._next

    def forget(self) -> None:
        """What was written counts no more."""
        for slot in range(2):
            self._forget(slot)

    def remove_new(self) -> None:
        """Remove the files that were not there before."""
        for path in self._new:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._pool.shutdown()
        for file in self._files:
            os.close(file)

    def _forget(self, slot: int) -> None:
        self._paths[slot].with_suffix(".json").unlink(missing_ok=True)


def _make_own(folder: Path) -> None:
    """In a place where others may write. Raises OSError for a folder that somebody else has made there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(folder):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(folder))


def _write_at(file: int, array: Any, offset: int) -> None:
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(file, left[:_MOST], offset)
        left, offset = left[written:], offset + written
