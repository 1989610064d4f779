"""Checksums of the parts of a token file: each part is held against its own the first time that it is read.

A file of them lies beside the tokens: a little-endian uint32 for each part, and at the end that of those before.
"""

import threading
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_jax.errors import DataError
from moe_jax.files.untrusted import check_regular

CHUNK_BYTES = 2**16  # about what a disk reads at once for a short sequence
AGAIN = "make the folder again with scripts/prepare_text.py"


def write_checksums(file: Path) -> None:
    """Beside a finished token file."""
    with file.open("rb") as tokens:
        sums = np.array([zlib.crc32(part) for part in iter(partial(tokens.read, CHUNK_BYTES), b"")], "<u4")
    checksum_file(file).write_bytes(np.append(sums, np.array(zlib.crc32(sums.data), "<u4")).tobytes())


def checksum_file(file: Path) -> Path:
    """Of a token file."""
    return file.with_suffix(".crc32")


class Chunks:
    """The parts of one token file; as many as `allowed` may be damaged, each of which is told. Threads may share it.

    Raises DataError for checksums that are missing or damaged themselves.
    """

    def __init__(self, file: Path, tokens: NDArray[np.unsignedinteger], allowed: int = 0):
        self._file, self._bytes, self._allowed = file, np.asarray(tokens).view(np.uint8), allowed
        self._width = tokens.dtype.itemsize
        self._sums = _read_checksums(file, -(-len(self._bytes) // CHUNK_BYTES))
        self._seen = bytearray(len(self._sums))  # 0: not yet, 1: whole, 2: damaged
        self._lock = threading.Lock()

    def whole(self, start: int, stop: int) -> bool:
        """Whether tokens from start up to stop are what was prepared. Raises DataError if more are not than allowed."""
        first, last = start * self._width // CHUNK_BYTES, (stop * self._width - 1) // CHUNK_BYTES
        states = [self._seen[chunk] or self._check(chunk) for chunk in range(first, last + 1)]
        return all(state == 1 for state in states)

    def _check(self, chunk: int) -> int:
        first, last = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, len(self._bytes))
        found, wanted = zlib.crc32(self._bytes[first:last].data), int(self._sums[chunk])
        with self._lock:
            if not self._seen[chunk]:
                if found != wanted:  # one too many stays unseen: all threads that read it raise
                    self._tell(f"{self._file} is damaged in bytes {first} to {last - 1}", found, wanted)
                self._seen[chunk] = 1 if found == wanted else 2
            return self._seen[chunk]

    def _tell(self, text: str, found: int, wanted: int) -> None:
        damaged = self._seen.count(2) + 1
        if damaged > self._allowed:
            raise DataError(
                f"{text}: their crc32 is {found}, and was {wanted}: {AGAIN}, "
                f"or have them passed over with data.damaged_chunks={damaged}"
            )
        print(f"warning: {text}, which are passed over ({damaged} of data.damaged_chunks={self._allowed})", flush=True)


def _read_checksums(file: Path, count: int) -> NDArray[np.uint32]:
    path = checksum_file(file)
    try:
        check_regular(path)
        sums = np.fromfile(path, "<u4")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from None
    if len(sums) != count + 1 or zlib.crc32(sums[:-1].data) != sums[-1]:
        raise DataError(f"{path} is damaged, or of another file: {AGAIN}")
    return sums[:-1]
