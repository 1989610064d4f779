"""One run at a time in a folder: who trains there says so in a file, and shows every few seconds that it still lives.

Imports no jax.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self, final

from moe_jax.distributed.heartbeat import is_supervised
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import parent_folders

FILE_NAME = "lock"
LAUNCH = "MOE_JAX_LAUNCH"  # environment variable with what a launcher's workers on all hosts have in common

BEAT_S = 5  # between two signs of life
SILENCE_S = 60  # without one, after which a process on another host counts as dead
_ENDING_S = 2  # that a process of this host which is there gets to end: it may just have been killed
_LOOK_S = 0.2
_EXITING = 0x4  # among Linux's flags of a process (PF_EXITING)


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that trains in a folder."""

    host: str
    pid: int
    started: str  # when, in the kernel's own count: process ids are used again
    kernel: str  # where it is the only one with its id
    launch: str  # see LAUNCH
    since: float  # Unix time
    beats: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def is_same(self, other: "Holder") -> bool:
        return (self.pid, self.started, self.kernel) == (other.pid, other.started, other.kernel)


@final
class FolderLock:
    """The right to train in a folder, as a context. Folders that it makes and nobody fills are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE_NAME
        kernel, launch = _kernel(), os.environ.get(LAUNCH, "")
        self._own = Holder(socket.gethostname(), os.getpid(), _started(os.getpid()), kernel, launch, time.time())
        self._lost_to: Holder | None = None
        self._ends = threading.Event()
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError if another run is there. One that is gone is replaced, which is said."""
        with contextlib.ExitStack() as closing:
            try:
                closing.enter_context(parent_folders([self._path]))
                self._take()
            except OSError as error:
                raise ConfigError(
                    f"log.dir={self._folder} cannot be written ({error.strerror}): name another folder"
                ) from None
            self._closing = closing.pop_all()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        with self._closing, contextlib.suppress(OSError), _opened(self._path) as file:
            if (holder := _holder(file)) is None or holder.is_same(self._own):
                self._path.unlink()

    def check(self) -> None:
        """Raise ConfigError if another run has taken this one for dead."""
        if self._lost_to is not None:
            raise ConfigError(
                f"log.dir={self._folder} was taken over by {self._lost_to}, as this process gave no sign of life for "
                f"{SILENCE_S} s: it ends here"
            )

    def _take(self) -> None:
        told, beats, since = False, -1, time.monotonic()
        while True:
            with _opened(self._path) as file:
                holder = _holder(file)
                is_here = holder is not None and holder.kernel == self._own.kernel
                silent_s = time.monotonic() - since
                if holder is None or (not _lives(holder) if is_here else self._is_dead(holder, silent_s)):
                    _write(file, self._own)
                    if holder is not None:
                        print(f"log.dir={self._folder}: {holder}, which trained there, is gone: taken over", flush=True)
                    return
            # a launcher may have been killed alone, and started again while its processes still end
            ending_s = SILENCE_S if is_supervised() else _ENDING_S
            if (is_here and silent_s > ending_s) or (not is_here and beats not in (-1, holder.beats)):
                raise ConfigError(
                    f"log.dir={self._folder} is in use by {holder} for {time.time() - holder.since:.0f} s: "
                    "wait for its end, or use another log.dir"
                )
            if not told and (not is_here or silent_s > _ENDING_S):
                told, beats = True, holder.beats
                print(
                    f"log.dir={self._folder} was in use by {holder}: waiting at most {SILENCE_S} s for a sign of life",
                    flush=True,
                )
            time.sleep(_LOOK_S)

    def _is_dead(self, holder: Holder, silent_s: float) -> bool:
        """Whether a process that cannot be seen from here is."""
        if holder.launch and holder.launch == self._own.launch:  # its launcher starts this one when that one has ended
            return True
        return max(silent_s, self._age_s()) > SILENCE_S

    def _age_s(self) -> float:
        """Of the last sign of life, by the clock of the file system: those of two hosts may differ."""
        probe = self._path.with_name(f"{FILE_NAME}.{self._own.host}.{self._own.pid}")
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime - self._path.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self) -> None:
        beats = 0
        while not self._ends.wait(BEAT_S):
            beats += 1
            with contextlib.suppress(OSError), _opened(self._path) as file:  # a full disk, or the folder is deleted
                holder = _holder(file)
                if self._ends.is_set():
                    return
                if holder is not None and not holder.is_same(self._own):
                    self._lost_to = holder
                    return
                _write(file, dataclasses.replace(self._own, beats=beats))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, made if it is missing, and nobody else's meanwhile."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666), "r+b", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileExistsError(errno.EEXIST, "its lock is no file", str(path))
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # else it was removed meanwhile
                    yield file
                    return


def _holder(file: IO[bytes]) -> Holder | None:
    file.seek(0)
    try:
        found = Holder(**json.loads(file.read(10_000)))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"pid": int, "since": float, "beats": int}
    is_whole = all(type(value) is kinds.get(name, str) for name, value in vars(found).items())
    return found if is_whole and found.pid > 0 else None


def _write(file: IO[bytes], holder: Holder) -> None:
    """In the length that it had, or else: on a full disk an old sign of life still finds room."""
    text = json.dumps(dataclasses.asdict(holder)).encode().ljust(400) + b"\n"
    file.seek(0)
    if file.write(text) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate()
    os.fsync(file.fileno())


def _kernel() -> str:
    """Of this process: the boot of its host and, of containers, the process ids that it sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _lives(holder: Holder) -> bool:
    """Whether a process of this kernel is still there, and not about to end."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        if not _stat(holder.pid):  # of another user, and hidden
            return True
    except (OSError, OverflowError):
        pass
    fields = _stat(holder.pid)
    if not fields:
        return not os.path.exists("/proc/self/stat")
    return fields[0] not in "ZX" and not int(fields[6]) & _EXITING and fields[19] == holder.started


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """What Linux says of a process after its name, from the state on; nothing elsewhere, or if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
