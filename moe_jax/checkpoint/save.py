"""Saving checkpoints: each is one orbax composite with a record of its contents, written in the background."""

import gc
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import jax

from moe_jax.checkpoint.arrays import array_records
from moe_jax.checkpoint.bucket_writer import BucketWriter
from moe_jax.checkpoint.checksums import agreed_digests
from moe_jax.checkpoint.files import FOLDER, DamagedError, check_files, first_line, quarantine, steps_of
from moe_jax.checkpoint.orbax_writer import OrbaxWriter, silent_orbax
from moe_jax.checkpoint.record import Record
from moe_jax.checkpoint.save_barrier import PeerSaveError, SaveBarrier
from moe_jax.checkpoint.storage import BucketStorage, Storage, storage_of
from moe_jax.distributed.processes import allgather, first_problem, is_main_process
from moe_jax.errors import CheckpointError, ConfigError, is_full_disk
from moe_jax.files.upload import upload_now
from moe_jax.plan.units import size
from moe_jax.telemetry.run_log import RunLog

_FULL = "no room on the disk"
_RESERVED_BYTES = 10**6  # bytes that a save leaves free on the disk, for other files of a run


class Writer(Protocol):
    """What writes checkpoints in the background, one at a time: orbax on a disk, or tensorstore into a bucket."""

    def all_steps(self) -> Collection[int]: ...
    def latest_step(self) -> int | None: ...
    def write(self, step: int, state: Any, record: Mapping[str, Any]) -> None: ...
    def wait_until_finished(self) -> None: ...
    def close(self) -> None: ...


class _StartedSave(NamedTuple):
    """A save that may still be in progress."""

    step: int
    error: Exception | None  # raised when it was started


class Checkpoints:
    """The checkpoints below a run's folder, of which the newest `keep` are retained.

    It is a context manager: leaving it waits for the save in progress. A save is complete once its files have been read
    back; only then are older checkpoints deleted. A failed save is reported, recorded as an alarm and counted, and the
    run continues; if the last save failed, leaving raises CheckpointError. Entering raises ConfigError if the folder
    cannot be written.

    `digests` computes the digests of a state (see checksums.py); `about` are the fields of a record that describe the
    run.
    """

    def __init__(
        self, run: Path, keep: int, log: RunLog, digests: Callable[[Any], jax.Array], about: Mapping[str, Any]
    ):
        self._run, self._keep, self._log, self._digests, self._about = run, keep, log, digests, about
        self._storage = storage_of(run)
        self._writer: Writer | None = None  # None: nothing can be written, for the reason `_unwritable`
        self._unwritable = ""
        self._started: _StartedSave | None = None
        self._num_failed, self._final_error = 0, ""  # failed saves, and the message if the last save failed
        self.last_failure = "", ""  # reason and cure of the last failed save
        self._deleted: set[int] = set()  # steps of the checkpoints that were deleted here
        self._barrier, self._contexts = SaveBarrier(), ExitStack()

    def __enter__(self) -> "Checkpoints":
        self._contexts.enter_context(silent_orbax())
        self._open()
        if self._writer is None:
            self._contexts.close()
            raise ConfigError(
                f"log.dir={self._run}: {self._run / FOLDER} cannot be written ({self._unwritable}): "
                "make it a folder that can be, or use another log.dir"
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._contexts:
            if error is None:  # after an error, other processes may not get here
                self._finish()
            self._close()  # its errors matter less than what ended the run, or why the last save failed
            if error is not None or self._num_failed:
                gc.collect()  # of errors in objects that threads left behind, some are printed when these are deleted
        if error is None and self._final_error:
            raise CheckpointError(self._final_error)

    def newest(self) -> int | None:
        """Wait for the save in progress, report its failure if it failed, and return the newest saved step, if any."""
        self._finish()
        return self._latest()

    def save(self, step: int, state: Any, **host: Any) -> None:
        """Start to save a state, which may be donated as soon as this returns. A step that is already saved is skipped.

        `host` are the fields of the record that describe the run's state on the host: `data`, `tuner`, `recent_losses`.
        All processes call it. If the previous save failed, that is reported first. Raises ReplicasError if replicas of
        the state differ between devices.
        """
        self._finish()
        self._check_for_deleted(step)
        if self._writer is None:
            self._open()
        if self._writer is None:
            self._report_failure(step, f"{self._run / FOLDER} cannot be written: {self._unwritable}", "see to it")
            return
        if step == self._latest():
            return
        if lacking := _lacking_room(self._storage, state):  # otherwise it would fail halfway
            self._report_failure(step, lacking, "free some space")
            return
        leaves = array_records(state, agreed_digests(self._digests(state), step, state))
        record = Record(step=step, leaves=leaves, **host, **self._about)
        self._started = _StartedSave(step, self._start(self._writer, record, state))

    def _start(self, writer: Writer, record: Record, state: Any) -> Exception | None:
        """Start to write a checkpoint. Returns the error if that fails."""
        self._barrier.begin()
        try:
            writer.write(record.step, state, record.to_json())
        except Exception as problem:  # orbax and its storage layer have no common type
            self._barrier.end()
            return problem
        return None

    def _finish(self) -> None:
        """Wait for the save in progress. If it failed on any process, report that and make a new writer."""
        if self._started is None:
            return
        started, self._started = self._started, None
        problem = self._wait(started)
        # a process that only knows that another one has failed leaves it to that one to say why
        known = "" if problem is None or isinstance(problem, PeerSaveError) else _reason(problem)
        reason = first_problem(known)
        if any(allgather(problem is not None)):
            self._reopen()  # once the files of the failed save are deleted
            self._report_failure(started.step, reason or "another process failed", self._cure(reason))
            return
        if self._final_error:
            self._delete_unfinished()
        self._final_error = ""
        self._delete_old()

    def _wait(self, started: _StartedSave) -> Exception | None:
        """Wait for a save, and read its files back on process 0. Returns the error of this process, if there is one."""
        assert self._writer is not None, "it has started the save"
        try:
            self._writer.wait_until_finished()
            if started.error is None and is_main_process():
                check_files(self._run, started.step)
        except DamagedError as error:
            self._quarantine(started.step, str(error))
            return error
        except Exception as error:
            return started.error or error
        return started.error

    def _cure(self, reason: str) -> str:
        """Say what helps against a failure of a save."""
        if reason.endswith(_FULL):
            return "free some space"
        in_bucket = isinstance(self._storage, BucketStorage)
        return "see to the network and the rights in its bucket" if in_bucket else "see to its disk"

    def _quarantine(self, step: int, reason: str) -> None:
        try:
            quarantine(self._run, step, reason)
        except CheckpointError as error:
            self._log.warn(str(error))

    def _delete_unfinished(self) -> None:
        """Delete what threads wrote for the save before this one after it had failed."""
        if is_main_process():
            try:
                self._storage.delete_unfinished()
            except OSError as error:
                self._log.warn(f"remains of a failed save in {self._run} stay ({error.strerror})")

    def _delete_old(self) -> None:
        """Delete all but the newest checkpoints, once these have been read back.

        orbax is not used for it: if one process could not delete a checkpoint, the others would wait for it.
        """
        for step in self._steps()[: -self._keep]:
            self._deleted.add(step)
            if is_main_process():
                try:
                    self._storage.delete(step)
                except OSError as error:
                    self._log.warn(f"the old checkpoint of step {step} in {self._run} stays ({error.strerror})")

    def _steps(self) -> list[int]:
        """List the steps of checkpoints that the writer knows and that were not deleted here."""
        return [] if self._writer is None else sorted({*self._writer.all_steps()} - self._deleted)

    def _check_for_deleted(self, step: int) -> None:
        """Report checkpoints that were deleted during the run, and make their folder again if it is gone."""
        if self._writer is None:
            return
        missing, is_whole = list[int](), False
        with suppress(OSError):  # the folder cannot be read, which `_open` finds and reports
            missing = [each for each in self._steps() if not self._storage.has(each)]
            is_whole = not missing and self._storage.is_there()
        if all(allgather(is_whole)):
            return
        if missing:
            steps = ", ".join(map(str, missing))
            self._log.alarm(step, f"checkpoints of steps {steps} in {self._run / FOLDER} were deleted during the run")
        self._reopen()

    def _latest(self) -> int | None:
        """The newest saved step. While nothing can be written, it is read from the folder, if that can be."""
        if self._writer is not None:
            return self._writer.latest_step()
        try:
            return max(steps_of(self._run), default=None)
        except CheckpointError:
            return None

    def _report_failure(self, step: int, reason: str, cure: str) -> None:
        self._num_failed += 1
        self.last_failure = reason, cure
        newest = self._latest()
        existing = "none is there yet" if newest is None else f"the newest is of step {newest}"
        text = f"the checkpoint of step {step} was not saved ({reason}), {existing}: {cure}"
        self._log.alarm(step, text, failed_saves=self._num_failed)
        outcome = "starts again" if newest is None else f"resumes from step {newest}"
        self._final_error = (
            f"log.dir={self._run}: its last checkpoint, of step {step}, was not saved ({reason}): "
            f"{cure}, or use another log.dir; the same command then {outcome}"
        )

    def _open(self) -> None:
        """Make the writer of the run's folder or bucket. If nothing can be written, there is none, for the reason
        `_unwritable`.
        """
        steps, problem = list[int](), ""
        try:
            if is_main_process():
                self._storage.prepare()
            if isinstance(self._storage, BucketStorage):
                steps = steps_of(self._run)
        except (OSError, CheckpointError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        self._unwritable = first_problem(problem)
        if self._unwritable:
            self._writer = None
        elif isinstance(self._storage, BucketStorage):
            self._writer = BucketWriter(self._storage, steps, self._barrier, lambda: upload_now(self._run))
        else:
            self._writer = OrbaxWriter(self._storage.folder, self._barrier)

    def _close(self) -> None:
        if self._writer is not None:
            with suppress(Exception):  # it raises the error of a failed save again
                self._writer.close()

    def _reopen(self) -> None:
        self._close()
        self._open()


def check_room(flag: str, run: Path, state: Any) -> None:
    """Raise ConfigError in all processes if one of them has no room on its disk for a checkpoint of a state, which may
    be shapes. All processes call it.
    """
    if lacking := _lacking_room(storage_of(run), state):
        raise ConfigError(f"{flag}={run} has no room for a checkpoint ({lacking}): free some space, or use another one")


def _lacking_room(storage: Storage, state: Any) -> str:
    """Return what a checkpoint of a state lacks on the disk of any process; empty if all have room."""
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    free = None
    with suppress(OSError):  # whether it can be written is found elsewhere
        free = storage.free_bytes()
    if not any(allgather(free is not None and free < needed + _RESERVED_BYTES)):
        return ""
    return f"it takes {size(needed)} and leaves {size(_RESERVED_BYTES)} free, and there are {size(free or 0)} left"


def _reason(problem: Exception) -> str:
    """Say why a save failed."""
    if is_full_disk(problem):
        return _FULL
    return f"{'it cannot be read back: ' if isinstance(problem, DamagedError) else ''}{first_line(problem)}"
