"""Saving checkpoints: each is one orbax composite with a record of its contents, written in the background."""

import gc
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from moe_jax.checkpoint.arrays import array_records
from moe_jax.checkpoint.bucket_writer import BucketWriter
from moe_jax.checkpoint.checksums import agreed_digests
from moe_jax.checkpoint.files import FOLDER, DamagedError, check_files, first_line, quarantine, steps_of
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
_SHARED_BYTES = 2**20  # of an array that its replicas write together, the least that each writes


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
        self._pending_step: int | None = None  # of the save that may still be in progress
        self._start_error: Exception | None = None  # raised when that save was started
        self._num_failed, self._final_error = 0, ""  # failed saves, and the message if the last save failed
        self.last_failure = "", ""  # reason and cure of the last failed save
        self._deleted: set[int] = set()  # steps of the checkpoints that were deleted here
        self._barrier, self._contexts = SaveBarrier(), ExitStack()

    def __enter__(self) -> "Checkpoints":
        self._contexts.enter_context(_silent_orbax())
        self._manager = self._new_manager()
        if self._manager is None:
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
        if self._manager is None:
            self._manager = self._new_manager()
        if self._manager is None:
            self._report_failure(step, f"{self._run / FOLDER} cannot be written: {self._unwritable}", "see to it")
            return
        if step == self._latest():
            return
        if lacking := _lacking_room(self._storage, state):  # otherwise it would fail halfway
            self._report_failure(step, lacking, "free some space")
            return
        self._pending_step, leaves = step, array_records(state, agreed_digests(self._digests(state), step, state))
        record = Record(step=step, leaves=leaves, **host, **self._about)
        self._barrier.begin()
        try:
            self._manager.write(step, state, record.to_json())
        except Exception as problem:  # orbax and its storage layer have no common type
            self._start_error = problem
            self._barrier.end()

    def _finish(self) -> None:
        """Wait for the save in progress. If it failed on any process, report that and make a new orbax manager."""
        if self._pending_step is None:
            return
        step, problem = self._pending_step, self._start_error
        self._pending_step = self._start_error = None
        try:
            self._manager.wait_until_finished()
            if problem is None and is_main_process():
                check_files(self._run, step)
        except DamagedError as error:
            problem = error
            self._quarantine(step, str(error))
        except Exception as error:
            problem = problem or error
        # a process that only knows that another one has failed leaves it to that one to say why
        known = "" if problem is None or isinstance(problem, PeerSaveError) else _reason(problem)
        reason = first_problem(known)
        if not any(allgather(problem is not None)):
            if self._final_error:
                self._delete_unfinished()
            self._final_error = ""
            self._delete_old()
            return
        self._close()
        self._manager = self._new_manager()  # once the files of the failed save are deleted
        in_bucket = isinstance(self._storage, BucketStorage)
        cure = "see to the network and the rights in its bucket" if in_bucket else "see to its disk"
        cure = "free some space" if reason.endswith(_FULL) else cure
        self._report_failure(step, reason or "another process failed", cure)

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
        """List the steps of checkpoints that the orbax manager knows and that were not deleted here."""
        return sorted({*self._manager.all_steps()} - self._deleted) if self._manager else []

    def _check_for_deleted(self, step: int) -> None:
        """Report checkpoints that were deleted during the run, and make their folder again if it is gone."""
        if self._manager is None:
            return
        missing, is_whole = list[int](), False
        with suppress(OSError):  # the folder cannot be read, which the new manager finds and reports
            missing = [each for each in self._steps() if not self._storage.has(each)]
            is_whole = not missing and self._storage.is_there()
        if all(allgather(is_whole)):
            return
        if missing:
            steps = ", ".join(map(str, missing))
            self._log.alarm(step, f"checkpoints of steps {steps} in {self._run / FOLDER} were deleted during the run")
        self._close()
        self._manager = self._new_manager()

    def _latest(self) -> int | None:
        """The newest saved step. While nothing can be written, it is read from the folder, if that can be."""
        if self._manager is not None:
            return self._manager.latest_step()
        try:
            return max(steps_of(self._run), default=None)
        except CheckpointError:
            return None

    def _close(self) -> None:
        if self._manager is not None:
            with suppress(Exception):  # it raises the error of a failed save again
                self._manager.close()

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

    def _new_manager(self) -> Any:
        """Make an orbax manager, or the writer of a bucket.

        If the folder cannot be written, return None and set `_unwritable` to the reason. This is checked first because
        orbax, if it fails there, leaves threads and other processes waiting.
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
            return None
        if isinstance(self._storage, BucketStorage):
            return BucketWriter(self._storage, steps, self._barrier, lambda: upload_now(self._run))
        # orbax compiles a program for each part of an array: smaller parts take longer to cut than to write
        handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SHARED_BYTES)
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        options = ocp.CheckpointManagerOptions(
            lightweight_initialize=True,  # otherwise orbax reads files in damaged folders
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier),
        )
        return _Manager(self._storage.folder, options=options)


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


class _Manager(ocp.CheckpointManager):
    """orbax's manager, which is not asked whether the run is being preempted.

    If it is, orbax subtracts a checkpoint's time from now, and fails where it has not read that time
    (`lightweight_initialize`).
    """

    def reached_preemption(self, step: int) -> bool:
        return False

    def write(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Begin to save a state and a record."""
        items = {"state": ocp.args.StandardSave(state), "record": ocp.args.JsonSave(record)}
        self.save(step, args=ocp.args.Composite(**items), force=True)


@contextmanager
def _silent_orbax() -> Iterator[None]:
    """Suppress the stack traces that orbax's threads print of errors which it also raises."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook

    def unraisable(error: Any) -> None:
        if "Event loop is closed" not in str(error.exc_value):  # raised by writes that end after the first failed one
            hook(error)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
