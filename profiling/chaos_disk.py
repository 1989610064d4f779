"""A separate disk for a run, small enough to be filled: a tmpfs, which only root may mount."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BALLAST = "ballast"


class SmallDisk:
    """A mounted tmpfs that can be filled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leave no byte free within this context."""
        ballast = self._folder / _BALLAST
        try:
            with ballast.open("wb") as file:
                _fill(file.fileno(), shutil.disk_usage(self._folder).free)
            yield
        finally:
            ballast.unlink()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk | None]:
    """Mount a small disk at the folder within this context; yields None if that is not possible here."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "moe_jax", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(file: int, num_bytes: int) -> None:
    """Write smaller and smaller blocks, since other processes write as well."""
    end = 0
    while num_bytes:
        try:
            os.posix_fallocate(file, end, num_bytes)
            end += num_bytes
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            num_bytes //= 2
