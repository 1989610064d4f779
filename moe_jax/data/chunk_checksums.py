"""Checksums of the chunks of a token file: each chunk is verified the first time that it is read.

They are stored in a file next to the tokens: one little-endian uint32 (CRC-32) per chunk, then the CRC-32 of all
preceding bytes of this file.
"""

import threading
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_jax.errors import DataError
from moe_jax.files.untrusted import check_regular

CHUNK_BYTES = 2**16  # about as much as a disk reads at once for a short sequence
REMAKE = "make the folder again with scripts/prepare_text.py"


def write_checksums(file: Path) -> None:
    """Write the checksums of a finished token file next to it."""
    with file.open("rb") as tokens:
        sums = np.array([zlib.crc32(chunk) for chunk in iter(partial(tokens.read, CHUNK_BYTES), b"")], "<u4")
    checksum_file(file).write_bytes(np.append(sums, np.array(zlib.crc32(sums.data), "<u4")).tobytes())


def checksum_file(file: Path) -> Path:
    """The path of the checksum file of a token file."""
    return file.with_suffix(".crc32")


class ChunkChecksums:
    """Verifies the chunks of one token file; thread-safe.

    Up to `allowed` chunks may be damaged; a warning is printed for each. Raises DataError if the checksum file is
    missing or damaged.
    """

    def __init__(self, file: Path, tokens: NDArray[np.unsignedinteger], allowed: int = 0):
        self._file, self._bytes, self._allowed = file, np.asarray(tokens).view(np.uint8), allowed
        self._width = tokens.dtype.itemsize
        self._sums = _read_checksums(file, -(-len(self._bytes) // CHUNK_BYTES))
        self._state = bytearray(len(self._sums))  # of each chunk: 0 not verified yet, 1 intact, 2 damaged
        self._lock = threading.Lock()

    def is_intact(self, start: int, stop: int) -> bool:
        """Whether all chunks of tokens [start, stop) match their checksums.

        Raises DataError if more chunks are damaged than allowed.
        """
        first, last = start * self._width // CHUNK_BYTES, (stop * self._width - 1) // CHUNK_BYTES
        states = [self._state[chunk] or self._verify(chunk) for chunk in range(first, last + 1)]
        return all(state == 1 for state in states)

    def _verify(self, chunk: int) -> int:
        """Compare a chunk with its checksum, and return its state."""
        first, last = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, len(self._bytes))
        found, wanted = zlib.crc32(self._bytes[first:last].data), int(self._sums[chunk])
        with self._lock:
            if not self._state[chunk]:
                if found != wanted:  # raises for one too many, whose state stays 0: every thread that reads it raises
                    self._report_damage(f"{self._file} is damaged in bytes {first} to {last - 1}", found, wanted)
                self._state[chunk] = 1 if found == wanted else 2
            return self._state[chunk]

    def _report_damage(self, text: str, found: int, wanted: int) -> None:
        """Print a warning about a damaged chunk. Raises DataError if it is one more than allowed."""
        damaged = self._state.count(2) + 1
        if damaged > self._allowed:
            raise DataError(
                f"{text}: their crc32 is {found}, and was {wanted}: {REMAKE}, "
                f"or have them passed over with data.damaged_chunks={damaged}"
            )
        print(f"warning: {text}, which are passed over ({damaged} of data.damaged_chunks={self._allowed})", flush=True)


def _read_checksums(file: Path, count: int) -> NDArray[np.uint32]:
    """The stored checksums of the `count` chunks of a token file. Raises DataError."""
    path = checksum_file(file)
    try:
        check_regular(path)
        sums = np.fromfile(path, "<u4")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {REMAKE}") from None
    if len(sums) != count + 1 or zlib.crc32(sums[:-1].data) != sums[-1]:
        raise DataError(f"{path} is damaged, or of another file: {REMAKE}")
    return sums[:-1]
