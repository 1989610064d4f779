"""Lock of a run folder in a bucket: an object that names the process that trains there, as in run_lock.py.

It is replaced only by writes that the store makes on condition that nobody else has replaced it. Imports no jax.
"""

import dataclasses
import threading
import time
from typing import Self, final

from moe_jax.files.local_copy import LOCK
from moe_jax.files.object_store import ABSENT, ObjectFolder, StoreError
from moe_jax.run.run_lock import ENDING_S, SILENCE_S, Holder, longest_ending_s

BEAT_S = 10  # between two heartbeats, each of which reads and writes the object
_POLL_S = 1


@final
class BucketLock:
    """The lock of a folder in a bucket, as a context manager. Raises StoreError and ConfigError."""

    def __init__(self, url: str) -> None:
        self._folder, self._own = ObjectFolder(url), Holder.this_process()
        self._lost_to: Holder | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        """Take the lock, also from a dead process, which is reported. Raises ConfigError if another run has it."""
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        try:
            holder, generation = self._read()
            if holder is not None and holder.is_same(self._own):
                self._folder.write_if(generation, LOCK, None)
        except StoreError:  # the next run finds that this process has ended
            pass

    def check(self) -> None:
        """Raise ConfigError if another run has taken over the lock, since this process seemed dead."""
        if self._lost_to is not None:
            raise self._lost_to.took_over(self._folder)

    def _take(self) -> None:
        """Wait until the folder is free or its holder is dead, and take the lock."""
        first, reported, since = b"", False, time.monotonic()
        while True:
            holder, generation = self._read()
            if holder == self._own:  # the store wrote it, and its answer was lost
                return
            if holder is None or self._is_dead(holder, silent_s=time.monotonic() - since):
                if self._folder.write_if(generation, LOCK, self._own.content()):
                    if holder is not None:
                        holder.report_gone(self._folder)
                    return
                continue  # somebody else was quicker
            first, waited_s = first or generation, time.monotonic() - since
            is_here = holder.kernel == self._own.kernel
            if waited_s > longest_ending_s() if is_here else generation != first:
                raise holder.in_use(self._folder)
            if not reported and (not is_here or waited_s > ENDING_S):
                reported = True
                holder.report_waiting(self._folder)
            time.sleep(_POLL_S)

    def _is_dead(self, holder: Holder, silent_s: float) -> bool:
        """Whether the holder has ended; `silent_s` is the time in which it has given no sign of life."""
        if holder.kernel == self._own.kernel:
            return not holder.is_alive()
        return holder.has_ended_for(self._own) or silent_s > SILENCE_S

    def _beat(self) -> None:
        """Write heartbeats until the lock is released or lost; runs in a thread of its own."""
        beats = 0
        while not self._ends.wait(BEAT_S):
            beats += 1
            try:
                holder, generation = self._read()
                if holder is not None and not holder.is_same(self._own):
                    self._lost_to = holder
                    return
                self._folder.write_if(generation, LOCK, dataclasses.replace(self._own, beats=beats).content())
            except StoreError:  # it is tried again, and after SILENCE_S others take this process for dead
                pass

    def _read(self) -> tuple[Holder | None, bytes]:
        content, generation = self._folder.read_versioned(LOCK)
        return (None, ABSENT) if content is None else (Holder.parse(content), generation)
