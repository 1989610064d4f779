"""Where the checkpoints of a run are: in a folder on disk, or in a bucket."""

from pathlib import Path
from typing import Any, Protocol

from moe_jax.checkpoint.in_bucket import BucketStorage
from moe_jax.checkpoint.on_disk import DiskStorage
from moe_jax.files.local_copy import url_of


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
        """Make the folder, if it is missing, and raise OSError if it cannot be written."""

    def is_there(self) -> bool:
        """Whether the folder exists, or need not exist."""

    def free_bytes(self) -> int | None:
        """Return the room that is left, None for no limit."""


def storage_of(run: Path) -> BucketStorage | DiskStorage:
    """Return the storage of a run's checkpoints: in the bucket if the run's folder is the local copy of one."""
    url = url_of(run)
    return BucketStorage(url) if url else DiskStorage(run)
