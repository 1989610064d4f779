"""The files of a run's checkpoints on disk."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from moe_jax.errors import CheckpointError
from moe_jax.files.atomic import check_writable
from moe_jax.files.local_copy import CHECKPOINTS
from moe_jax.files.untrusted import read_bytes

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

    def is_there(self) -> bool:
        return self.folder.is_dir()

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.folder).free
