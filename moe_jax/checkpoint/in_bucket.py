"""The files of a run's checkpoints in a bucket.

A store cannot rename a folder. So a step is written under its final name, and complete once its last object, the commit
mark, is there.
"""

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from moe_jax.errors import CheckpointError
from moe_jax.files.local_copy import CHECKPOINTS
from moe_jax.files.object_store import ObjectFolder, StoreError
from moe_jax.files.untrusted import MOST_BYTES

COMMITTED = "_CHECKPOINT_METADATA"  # of each step, written last; orbax's name for it
REASON = "reason.txt"
_AT_A_TIME = 8  # objects that are copied


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
            raise CheckpointError(f"{self.folder} cannot be read ({error.strerror}): use another log.dir") from None
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
        """Delete the remains of saves that did not end."""
        self.folder.check(writes=True)
        committed = set(self.folders())
        steps = {name.partition("/")[0] for name in self.folder.names()}
        for step in sorted(each for each in steps - committed if each.isdecimal()):
            self.folder.delete(self.folder.names(f"{step}/"))

    def is_there(self) -> bool:
        return True

    def free_bytes(self) -> int | None:
        return None
