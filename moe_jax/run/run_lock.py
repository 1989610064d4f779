"""Lock of a run folder, so that only one run at a time trains there. Imports no jax.

The lock is a file that names the process that trains there, which rewrites it every few seconds as a heartbeat.
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
from moe_jax.errors import ConfigError, unwritable
from moe_jax.files.atomic import parent_folders
from moe_jax.files.local_copy import LOCK as FILE_NAME

LAUNCH = "MOE_JAX_LAUNCH"  # environment variable with an ID that all workers of one launch have in common, on all hosts

BEAT_S = 5  # between two heartbeats
SILENCE_S = 60  # without a heartbeat, after which a process on another host counts as dead
ENDING_S = 2  # to wait for a live process on this host to end: it may just have been killed
_POLL_S = 0.2
_EXITING = 0x4  # PF_EXITING, a flag of Linux processes


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds the lock of a folder, as written in the lock file."""

    host: str
    pid: int
    started: str  # start time in the kernel's clock ticks, since process ids are reused
    kernel: str  # identifies the boot and the pid namespace, in which the pid is unique
    launch: str  # see LAUNCH
    since: float  # when it took the lock, Unix time
    beats: int = 0  # heartbeats so far

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def is_same(self, other: "Holder") -> bool:
        return (self.pid, self.started, self.kernel) == (other.pid, other.started, other.kernel)

    @classmethod
    def this_process(cls) -> "Holder":
        pid, launch = os.getpid(), os.environ.get(LAUNCH, "")
        return cls(socket.gethostname(), pid, _start_time(pid), _kernel(), launch, time.time())

    @classmethod
    def parse(cls, content: bytes) -> "Holder | None":
        """The holder in the content of a lock file; None if it is empty or invalid."""
        try:
            found = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds = {"pid": int, "since": float, "beats": int}
        is_whole = all(type(value) is kinds.get(name, str) for name, value in vars(found).items())
        return found if is_whole and found.pid > 0 else None

    def content(self) -> bytes:
        """The content of the lock file, padded to a fixed length, so that it can be replaced on a full disk."""
        return json.dumps(dataclasses.asdict(self)).encode().ljust(400) + b"\n"

    def is_alive(self) -> bool:
        """Whether a process on this kernel still exists and is not about to end."""
        return _is_alive(self)

    def has_ended_for(self, other: "Holder") -> bool:
        """Whether both have one launcher, which starts a process again only after it has ended."""
        return bool(self.launch) and self.launch == other.launch

    def in_use(self, folder: object) -> ConfigError:
        """The error of a folder that this process, which is alive, uses."""
        return ConfigError(
            f"log.dir={folder} is in use by {self} for {time.time() - self.since:.0f} s: wait for its end, or use "
            "another log.dir"
        )

    def took_over(self, folder: object) -> ConfigError:
        """The error of a process whose lock this one has taken."""
        return ConfigError(
            f"log.dir={folder} was taken over by {self}, as this process gave no sign of life for {SILENCE_S} s: it "
            "ends here"
        )

    def report_gone(self, folder: object) -> None:
        """Print that the lock of this process, which has ended, is taken."""
        print(f"log.dir={folder}: {self}, which trained there, is gone: taken over", flush=True)

    def report_waiting(self, folder: object) -> None:
        """Print that another process waits for this one, which may have ended."""
        print(f"log.dir={folder} was in use by {self}: waiting at most {SILENCE_S} s for a sign of life", flush=True)


def longest_ending_s() -> float:
    """Seconds to wait for a live process on this host to end.

    A launcher may have been killed and restarted while its old worker processes are still ending.
    """
    return SILENCE_S if is_supervised() else ENDING_S


@final
class FolderLock:
    """The lock of a folder, as a context manager. Folders that it creates are removed at the end if they are empty."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE_NAME
        self._own = Holder.this_process()
        self._lost_to: Holder | None = None
        self._ends = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Take the lock, also from a dead process, which is reported. Raises ConfigError if another run has it."""
        with contextlib.ExitStack() as closing:
            try:
                closing.enter_context(parent_folders([self._path]))
                self._take()
            except OSError as error:
                raise unwritable("log.dir", self._folder, error) from None
            self._closing = closing.pop_all()
        self._beating.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._beating.join()  # a heartbeat would create the file again
        with self._closing, contextlib.suppress(OSError), _opened(self._path) as file:
            if (holder := _holder(file)) is None or holder.is_same(self._own):
                self._path.unlink()

    def check(self) -> None:
        """Raise ConfigError if another run has taken over the lock, since this process seemed dead."""
        if self._lost_to is not None:
            raise self._lost_to.took_over(self._folder)

    def _take(self) -> None:
        """Wait until the folder is free or its holder is dead, and take the lock. Raises ConfigError and OSError."""
        reported, beats, since = False, -1, time.monotonic()
        while True:
            with _opened(self._path) as file:
                holder = _holder(file)
                is_here = holder is not None and holder.kernel == self._own.kernel
                silent_s = time.monotonic() - since
                if holder is None or (not holder.is_alive() if is_here else self._is_dead(holder, silent_s)):
                    _write(file, self._own)
                    if holder is not None:
                        holder.report_gone(self._folder)
                    return
            if (is_here and silent_s > longest_ending_s()) or (not is_here and beats not in (-1, holder.beats)):
                raise holder.in_use(self._folder)
            if not reported and (not is_here or silent_s > ENDING_S):
                reported, beats = True, holder.beats
                holder.report_waiting(self._folder)
            time.sleep(_POLL_S)

    def _is_dead(self, holder: Holder, silent_s: float) -> bool:
        """Whether a process that is not visible from here is dead. `silent_s`: time observed without a heartbeat."""
        return holder.has_ended_for(self._own) or max(silent_s, self._age_s()) > SILENCE_S

    def _age_s(self) -> float:
        """Time since the last heartbeat in seconds, by the file system's clock: the clocks of two hosts may differ."""
        probe = self._path.with_name(f"{FILE_NAME}.{self._own.host}.{self._own.pid}")
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime - self._path.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Write heartbeats until the lock is released or lost; runs in a thread of its own."""
        beats = 0
        while not self._ends.wait(BEAT_S):
            beats += 1
            with contextlib.suppress(OSError), _opened(self._path) as file:  # a full disk, or a deleted folder
                holder = _holder(file)
                if holder is not None and not holder.is_same(self._own):
                    self._lost_to = holder
                    return
                _write(file, dataclasses.replace(self._own, beats=beats))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open the lock file for exclusive access; creates it if it is missing. Raises OSError."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666), "r+b", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileExistsError(errno.EEXIST, "its lock is no file", str(path))
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # else it was removed in the meantime
                    yield file
                    return


def _holder(file: IO[bytes]) -> Holder | None:
    """The holder in a lock file; None if the file is empty or invalid."""
    file.seek(0)
    return Holder.parse(file.read(10_000))


def _write(file: IO[bytes], holder: Holder) -> None:
    """Write a holder into a lock file. Raises OSError."""
    text = holder.content()
    file.seek(0)
    if file.write(text) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate()
    os.fsync(file.fileno())


def _kernel() -> str:
    """Identifies the boot of this host and the pid namespace (container) of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _is_alive(holder: Holder) -> bool:
    """Whether a process on this kernel still exists and is not about to end."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        if not _stat(holder.pid):  # a process of another user, which is hidden
            return True
    except (OSError, OverflowError):
        pass
    fields = _stat(holder.pid)
    if not fields:
        return not os.path.exists("/proc/self/stat")
    return fields[0] not in "ZX" and not int(fields[6]) & _EXITING and fields[19] == holder.started


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if unknown."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of Linux's /proc/PID/stat from the process state on; empty on other systems, or if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
