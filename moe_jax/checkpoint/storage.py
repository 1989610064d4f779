"""Where the checkpoints of a run are: in a folder on disk, or in a bucket.

A store cannot rename a folder. So in a bucket a step is written under its final name, and complete once its last
object, the commit mark, is there.
"""

import errno
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, final

from moe_jax.errors import CheckpointError, OutageError
from moe_jax.files.atomic import check_writable
from moe_jax.files.local_copy import CHECKPOINTS, url_of
from moe_jax.files.object_store import ObjectFolder, StoreError
from moe_jax.files.untrusted import MOST_BYTES, read_bytes

COMMITTED = "_CHECKPOINT_METADATA"  # of each step, written last; orbax's name for it
_UNFINISHED = "*.orbax-checkpoint-tmp*"  # folders on disk that orbax writes, and renames once they are complete
_AT_A_TIME = 8  # objects that are copied
_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds for writes of a failed save to end


@final
class BucketStorage:
    """The checkpoints of a run in a bucket, as `Storage`."""

    def __init__(self, url: str) -> None:
        self.folder = ObjectFolder(url) / CHECKPOINTS

    def folders(self) -> list[str]:
        """Return the names of those with a commit mark: others are the remains of saves that did not end."""
        try:
            names = self.folder.names()
        except StoreError as error:
            kind = OutageError if error.errno in (errno.ETIMEDOUT, errno.EIO) else CheckpointError
            raise kind(f"{self.folder} cannot be read ({error.strerror}): use another log.dir") from None
        return [name.partition("/")[0] for name in names if name.endswith(f"/{COMMITTED}") and name.count("/") == 1]

    def read(self, name: str) -> bytes:
        if self.folder.has(name, MOST_BYTES + 1):
            raise StoreError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", str(self.folder / name))
        return self.folder.read(name)

    def require(self, name: str, size: int) -> None:
        if not self.folder.has(name, size):
            raise ValueError(f"{name.partition('/')[2]} is missing, or has fewer than {size} bytes")

    def spec(self, name: str) -> dict[str, Any]:
        return (self.folder / name).spec()

    def has(self, step: int) -> bool:
        return self.folder.has(f"{step}/{COMMITTED}")

    def delete(self, step: int) -> None:
        """Delete a step's objects, the commit mark first: what is left after an error counts as unfinished."""
        self.folder.delete([f"{step}/{COMMITTED}"])
        self.folder.delete(self.folder.names(f"{step}/"))

    def is_taken(self, name: str) -> bool:
        return bool(self.folder.names(f"{name}/"))

    def move(self, step: int, target: str, reason: str) -> str:
        """Copy a step's objects, and delete them where they were."""
        names = self.folder.names(f"{step}/")
        self.folder.write(f"{target}/{REASON}", reason.encode() + b"\n")

        def copy(name: str) -> None:
            if content := self.folder.read(name):
                self.folder.write(f"{target}/{name.partition('/')[2]}", content)

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(copy, names))
        self.delete(step)
        return str(self.folder / target)

    def prepare(self) -> None:
        self.folder.check(writes=True)
        self.delete_unfinished()

    def delete_unfinished(self) -> None:
        names = self.folder.names()
        for step in sorted({step for name in names if (step := name.partition("/")[0]).isdecimal()}):
            if not self.folder.has(f"{step}/{COMMITTED}"):  # asked for itself: a refused list looks like an empty one
                self.folder.delete(name for name in names if name.startswith(f"{step}/"))

    def is_there(self) -> bool:
        return True

    def free_bytes(self) -> int | None:
        return None


REASON = "reason.txt"  # in a folder that was moved away


@final
class DiskStorage:
    """A folder of checkpoints on disk, as `Storage`."""

    def __init__(self, run: Path) -> None:
        self._shown = run / CHECKPOINTS
        self.folder = self._shown.resolve()  # as tensorstore and orbax need it: absolute, without `..`

    def folders(self) -> list[str]:
        folder = self._shown
        try:
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"{folder} is not a folder: remove it, or use another log.dir")
            return [path.name for path in folder.glob("*") if path.is_dir()]
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read ({error.strerror}): use another log.dir") from None

    def read(self, name: str) -> bytes:
        return read_bytes(self.folder / name)

    def require(self, name: str, size: int) -> None:
        file, short = self.folder / name, name.partition("/")[2]
        if not file.is_file():
            raise ValueError(f"{short} is missing")
        if file.stat().st_size < size:
            raise ValueError(f"{short} has {file.stat().st_size} of {size} bytes")

    def spec(self, name: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.folder / name}/"}

    def has(self, step: int) -> bool:
        return (self.folder / str(step)).is_dir()

    def delete(self, step: int) -> None:
        shutil.rmtree(self.folder / str(step))

    def is_taken(self, name: str) -> bool:
        return (self.folder / name).exists()

    def move(self, step: int, target: str, reason: str) -> str:
        checkpoint, moved = self._shown / str(step), self._shown / target
        moved.parent.mkdir(exist_ok=True)
        with suppress(OSError):  # on a full disk, moving it matters more than the reason
            (checkpoint / REASON).write_text(reason + "\n")
        checkpoint.rename(moved)
        return str(moved)

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        check_writable(self.folder / "test")
        self.delete_unfinished()

    def delete_unfinished(self) -> None:
        """Try several times: threads that still write for a failed save add files meanwhile."""
        for folder in self.folder.glob(_UNFINISHED):
            for wait in _WAITS:
                with suppress(OSError):
                    shutil.rmtree(folder)
                if not folder.exists():
                    break
                time.sleep(wait)
            else:
                shutil.rmtree(folder)

    def is_there(self) -> bool:
        return self.folder.is_dir()

    def free_bytes(self) -> int | None:
        there = next(each for each in (self.folder, *self.folder.parents) if each.exists())
        return shutil.disk_usage(there).free


class Storage(Protocol):
    """The files of a run's checkpoints, by names such as `500/record/metadata`."""

    def folders(self) -> list[str]:
        """Return the names of the folders among the checkpoints. Raises CheckpointError if they cannot be read."""

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises OSError."""

    def require(self, name: str, size: int) -> None:
        """Raise ValueError unless a file exists and has at least `size` bytes."""

    def spec(self, name: str) -> dict[str, Any]:
        """Describe a folder for tensorstore."""

    def has(self, step: int) -> bool:
        """Whether a step has a folder. Raises OSError."""

    def delete(self, step: int) -> None:
        """Delete a step's folder. Raises OSError."""

    def is_taken(self, name: str) -> bool:
        """Whether a folder for a checkpoint that is moved away exists. Raises OSError."""

    def move(self, step: int, target: str, reason: str) -> str:
        """Move a step's folder, add a file with the reason, and return its new path. Raises OSError."""

    def prepare(self) -> None:
        """Make the folder, if it is missing, and delete the remains of saves that did not end.

        Raises OSError if it cannot be written.
        """

    def delete_unfinished(self) -> None:
        """Delete the remains of saves that did not end, while none is in progress. Raises OSError."""

    def is_there(self) -> bool:
        """Whether the folder exists, or need not exist."""

    def free_bytes(self) -> int | None:
        """Return the room that is left, None for no limit."""


def storage_of(run: Path) -> BucketStorage | DiskStorage:
    """Return the storage of a run's checkpoints: in the bucket if the run's folder is the local copy of one."""
    url = url_of(run)
    return BucketStorage(url) if url else DiskStorage(run)
