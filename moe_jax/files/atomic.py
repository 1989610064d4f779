"""Files that are written whole or not at all."""

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, final

from moe_jax.errors import is_full_disk

_UNFINISHED = ".part"


def is_own(folder: Path) -> bool:
    """Whether it is a folder of this user, and no link, that nobody else can write to. Raises OSError."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def write_atomically(path: Path, text: str) -> None:
    """Put `text` at `path` whole or, when the process dies on the way, leave what was there. Raises OSError."""
    write_together({path: text.encode()})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Put several files, and the folders above them, where all of them can be written, or else none.

    Raises OSError.
    """
    parts = {path: _part(path) for path in contents}
    with folders_above(contents):
        try:
            for path, part in parts.items():
                with part.open("wb") as file:
                    file.write(contents[path])
                    file.flush()
                    os.fsync(file.fileno())
            for path, part in parts.items():
                part.replace(path)
        finally:
            for part in parts.values():
                with suppress(OSError):  # none was made, and why is told already
                    part.unlink()


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[None]:
    """A missing or empty folder; if the work inside fails, it is so again, and folders made above it are gone."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        for each in folder.iterdir() if folder.is_dir() else ():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
        for each in missing:
            with suppress(OSError):  # it was not made, or holds something of others
                each.rmdir()
        raise


@final
class Appended:
    """A file that grows, as a context; the run that it tells of never waits for it, nor fails with it.

    What cannot be written, as on a full disk, is kept in memory until it can. A file that was deleted is put back.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._waiting = path, path.open("a+b", buffering=0), b""
        self._told_problem = False
        self._news: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.append(b"")
        self._file.close()

    def write(self, line: str) -> bool:
        """Append a line after those that wait; returns whether all are written."""
        return self.append(f"{line}\n".encode())

    def append(self, data: bytes) -> bool:
        """The same of bytes."""
        self._waiting += data
        try:
            self._put_back()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._told_problem:
                full = is_full_disk(error)
                reason = "finds no room on the disk" if full else f"cannot be written ({error.strerror})"
                cure = "make room" if full else "make it writable"
                self._news.append(f"{self.path} {reason}, and what it lacks waits in memory: {cure}")
            self._told_problem = True
        return not self._waiting

    def news(self) -> list[str]:
        """What has gone wrong since this was last asked; that something cannot be written is said once."""
        news, self._news = self._news, []
        return news

    @property
    def lacks(self) -> int:
        """Bytes that wait."""
        return len(self._waiting)

    def _put_back(self) -> None:
        """If there is no such file any more, make it again of what the open one holds."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.open("a+b", buffering=0)
        if new.tell() == 0:  # else somebody else has put one there
            self._news.append(f"{self.path} was deleted while the run writes it: it is put back")
            with suppress(OSError):  # on network disks it can be gone for good
                self._file.seek(0)
                self._waiting = self._file.read() + self._waiting
        self._file.close()
        self._file = new


def check_writable(*paths: Path) -> None:
    """Raise OSError, with the file or folder that is at fault, if files could not be written; leaves nothing behind."""
    for path in paths:
        if path.is_dir():
            raise _problem(errno.EISDIR, path)
        above = next(each for each in path.parents if each.exists())
        if not above.is_dir():
            raise _problem(errno.ENOTDIR, above)
    with folders_above(paths):
        for path in paths:  # rights alone tell too little: some file systems take no files, whoever asks
            try:
                _part(path).open("ab").close()
            except OSError as error:
                raise _problem(error.errno or 0, path) from None
            _part(path).unlink()


def reason(error: OSError) -> str:
    """The file or folder at fault, and what is wrong with it."""
    return f"{str(error.filename).removesuffix(_UNFINISHED)}: {error.strerror}"


@contextmanager
def folders_above(paths: Collection[Path]) -> Iterator[None]:
    """Make what is missing of them; what is empty at the end goes again."""
    missing = {each for path in paths for each in path.parents if not each.exists()}
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in sorted(missing, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # it holds something
                each.rmdir()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}{_UNFINISHED}")


def _problem(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
