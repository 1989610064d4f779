"""Atomic writes: files and folders that are complete or absent, and files that only grow."""

import errno
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, final

from moe_jax.errors import is_full_disk

_UNFINISHED = ".part"
_TEMPORARY = r"(\.[0-9a-f]{8})?\.part$"  # what a temporary name has besides that of the file


def is_private_folder(folder: Path) -> bool:
    """Whether a path is a folder, not a link, that this user owns and nobody else can write to. Raises OSError."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def write_atomically(path: Path, text: str, is_shared: bool = False) -> None:
    """Replace the file at `path` by `text`; if the process dies meanwhile, the old file remains. Raises OSError.

    A file that `is_shared` may be written by several processes at once, of which the last one counts.
    """
    write_together({path: text.encode()}, is_shared)


def write_pieces_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """Do the same with a content in pieces, of which one is in memory at a time. Raises OSError, and their errors."""
    write_together({path: pieces})


def write_together(contents: Mapping[Path, bytes | Iterable[bytes]], is_shared: bool = False) -> None:
    """Write several files, whole or in pieces, and their parent folders if all can be written, and none otherwise.

    Files that are not shared have one temporary name, so that what a killed process leaves is replaced. Raises OSError.
    """
    temporary = {path: _temporary(path, is_shared) for path in contents}
    with parent_folders(contents):
        try:
            for path, unfinished in temporary.items():
                try:
                    with unfinished.open("wb") as file:
                        content = contents[path]
                        file.writelines([content] if isinstance(content, bytes) else content)
                        file.flush()
                        os.fsync(file.fileno())
                except OSError as error:  # that of a full disk names no file, and closing the file raises it again
                    raise _problem(error.errno or 0, path) from error
            for path, unfinished in temporary.items():
                unfinished.replace(path)
        finally:
            for unfinished in temporary.values():
                with suppress(OSError):  # it was not created, and an error that says why is already being raised
                    unfinished.unlink()


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[None]:
    """Context in which a missing or empty folder is filled; if the body raises, it is missing or empty again.

    Parent folders that were created in the body are removed, too.
    """
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
            with suppress(OSError):  # it was not created, or contains other files
                each.rmdir()
        raise


@contextmanager
def write_folder_atomically(output: Path) -> Iterator[Path]:
    """Context with a new folder, which becomes `output` at the end. An error, Ctrl-C and SIGTERM remove it.

    `output` may be an empty folder. Raises OSError.
    """
    prefix = f".{output.name}-"
    with parent_folders([output]), _sigterm_raises():
        try:
            with tempfile.TemporaryDirectory(dir=output.parent, prefix=prefix) as scratch:
                folder = Path(scratch) / output.name
                folder.mkdir()
                yield folder
                folder.rename(output)
        except OSError as error:
            if str(error.filename).startswith(str(output.with_name(prefix))):  # a file that nobody will find
                error.filename = str(output)
            raise


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit where it would end the process at once."""

    def exit_(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, exit_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@final
class AppendOnlyFile:
    """A file that is only appended to, as a context. A write that fails neither blocks nor ends the run.

    Bytes that cannot be written, for example because the disk is full, stay in memory until they can be. A file that
    was deleted is created again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._pending = path, path.open("a+b", buffering=0), b""
        self._reported_problem = False
        self._messages: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.append(b"")
        self._file.close()

    def write(self, line: str) -> bool:
        """Append a line, after all pending ones, and return whether everything has been written."""
        return self.append(f"{line}\n".encode())

    def append(self, data: bytes) -> bool:
        """Append bytes, after all pending ones, and return whether everything has been written."""
        self._pending += data
        try:
            self._restore_deleted()
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not self._reported_problem:
                full = is_full_disk(error)
                reason = "does not fit on the disk" if full else f"cannot be written ({error.strerror})"
                cure = "free some space" if full else "make it writable"
                self._messages.append(f"{self.path} {reason}, and its last lines wait in memory: {cure}")
            self._reported_problem = True
        return not self._pending

    def take_messages(self) -> list[str]:
        """Return the problems since the last call. A file that cannot be written is reported only once."""
        messages, self._messages = self._messages, []
        return messages

    @property
    def pending_bytes(self) -> int:
        """The number of bytes that could not be written yet."""
        return len(self._pending)

    def _restore_deleted(self) -> None:
        """If the file was deleted, create it again with the content of the open one."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.open("a+b", buffering=0)
        if new.tell() == 0:  # otherwise another program has created one with content
            self._messages.append(f"{self.path} was deleted while the run writes it: it is created again")
            with suppress(OSError):  # on network disks the content can be lost
                self._file.seek(0)
                self._pending = self._file.read() + self._pending
        self._file.close()
        self._file = new


def check_writable(*paths: Path) -> None:
    """Raise OSError, with the file or folder at fault, if these files cannot be written. Leaves no files behind."""
    for path in paths:
        if path.is_dir():
            raise _problem(errno.EISDIR, path)
        above = next(each for each in path.parents if each.exists())
        if not above.is_dir():
            raise _problem(errno.ENOTDIR, above)
    with parent_folders(paths):
        for path in paths:  # checking permissions is not enough: some file systems do not accept files from anybody
            probe = _temporary(path, is_shared=True)
            try:
                probe.open("ab").close()
            except OSError as error:
                raise _problem(error.errno or 0, path) from None
            probe.unlink()


def reason(error: OSError) -> str:
    """Return the file or folder at fault, and what is wrong with it."""
    return f"{re.sub(_TEMPORARY, '', str(error.filename))}: {error.strerror}"


@contextmanager
def parent_folders(paths: Collection[Path]) -> Iterator[None]:
    """Context in which the parent folders of `paths` exist; those it created are removed at the end if empty."""
    missing = {each for path in paths for each in path.parents if not each.exists()}
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in sorted(missing, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # it is not empty
                each.rmdir()


def _temporary(path: Path, is_shared: bool) -> Path:
    own = f".{secrets.token_hex(4)}" if is_shared else ""
    return path.with_name(f"{path.name}{own}{_UNFINISHED}")


def _problem(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
