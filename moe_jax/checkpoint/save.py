"""Checkpoints that a run makes: one orbax composite each, written in the background, with a record of what it holds."""

import gc
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from moe_jax.checkpoint.arrays import leaves_of
from moe_jax.checkpoint.checksums import agreed
from moe_jax.checkpoint.files import FOLDER, DamagedError, check_files, first_line, home
from moe_jax.checkpoint.quarantine import quarantine
from moe_jax.checkpoint.record import Record
from moe_jax.checkpoint.save_barrier import SaveMeeting
from moe_jax.distributed.processes import allgather, is_main_process
from moe_jax.errors import CheckpointError, ConfigError, is_full_disk
from moe_jax.files.atomic import check_writable
from moe_jax.plan.plan_text import size
from moe_jax.telemetry.run_log import RunLog

LEFT_FREE = 10**6  # bytes of the disk, for what else a run writes


class Checkpoints:
    """The checkpoints below a run's folder. A context: leaving it waits for a save under way.

    A save counts once its files have been read back, and only then are older ones deleted. One that fails is told,
    recorded as an alarm and counted, and the run goes on; CheckpointError is raised on leaving if it was the last one.
    Entering raises ConfigError if the folder cannot be written.

    `digests` makes those of a state, `about` is what records say of the run.
    """

    def __init__(
        self, run: Path, keep: int, log: RunLog, digests: Callable[[Any], jax.Array], about: Mapping[str, Any]
    ):
        self._run, self._keep, self._log, self._digests, self._about = run, keep, log, digests, about
        self._under_way: int | None = None  # the step of the save that may not be done yet
        self._problem: Exception | None = None  # with which it could not even begin
        self._failed, self._lost = 0, ""  # saves, and why the last one failed if it did
        self.last_failure = "", ""  # of any save: the reason and the cure
        self._deleted: set[int] = set()  # steps
        self._meeting, self._leaving = SaveMeeting(), ExitStack()

    def __enter__(self) -> "Checkpoints":
        self._leaving.enter_context(_silent_orbax())
        self._manager = self._new_manager()
        if self._manager is None:
            self._leaving.close()
            raise ConfigError(
                f"log.dir={self._run}: {self._run / FOLDER} cannot be written ({self._unwritable}): "
                "make it a folder that can be, or use another log.dir"
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._leaving:
            if error is None:  # or the others do not come here
                self._finish()
            self._close()  # what ended the run is told, or that the last save failed
        if error is None and self._lost:
            raise CheckpointError(self._lost)

    def newest(self) -> int | None:
        """The last step saved, once it is on the disk; None: there is none. What went wrong with the save is told."""
        self._finish()
        return self._latest()

    def save(self, step: int, state: Any, **host: Any) -> None:
        """Start saving; the state may be donated as soon as this returns. A step that is saved already is kept.

        `host` is what the record has of the run besides arrays: `data`, `tuner`, `recent_losses`. All processes call
        it. What went wrong with the save before is told first. Raises ReplicasError for a state that devices do not
        agree on.
        """
        self._finish()
        self._look_for_deleted(step)
        if self._manager is None:
            self._manager = self._new_manager()
        if self._manager is None:
            self._tell_failure(step, f"{self._run / FOLDER} cannot be written: {self._unwritable}", "see to it")
            return
        if step == self._latest():
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(home(self._run)).free
        if any(allgather(free < needed + LEFT_FREE)):  # or it would fail in the middle
            self._tell_failure(step, f"it takes {size(needed)}, and there are {size(free)} left", "make room")
            return
        self._under_way, leaves = step, leaves_of(state, agreed(self._digests(state), step, state))
        record = Record(step=step, leaves=leaves, **host, **self._about)
        items = {"state": ocp.args.StandardSave(state), "record": ocp.args.JsonSave(record.to_json())}
        self._meeting.begin()
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as problem:  # orbax and its storage layer have no common type
            self._problem = problem
            self._meeting.end()

    def _finish(self) -> None:
        """Wait for the save under way; if it failed anywhere, that is told, and a new manager takes over."""
        if self._under_way is None:
            return
        step, problem = self._under_way, self._problem
        self._under_way = self._problem = None
        try:
            self._manager.wait_until_finished()
            if problem is None and is_main_process():
                check_files(self._run, step)
        except DamagedError as error:
            problem = error
            self._set_aside(step, str(error))
        except Exception as error:
            problem = problem or error
        if not any(allgather(problem is not None)):
            self._lost = ""
            self._delete_old()
            return
        self._close()
        self._manager = self._new_manager()  # it clears away what the other has left
        if is_full_disk(problem):
            self._tell_failure(step, "no room on the disk", "make room")
        elif isinstance(problem, DamagedError):
            self._tell_failure(step, f"it cannot be read back: {problem}", "see to its disk")
        else:
            self._tell_failure(step, first_line(problem) if problem else "another process failed", "see to its disk")

    def _set_aside(self, step: int, reason: str) -> None:
        try:
            quarantine(self._run, step, reason)
        except CheckpointError as error:
            self._log.warn(str(error))

    def _delete_old(self) -> None:
        """All but the newest, once these have been read back. Not by orbax, whose other processes would wait for one
        that cannot.
        """
        for step in self._steps()[: -self._keep]:
            self._deleted.add(step)
            if is_main_process():
                try:
                    shutil.rmtree(home(self._run) / str(step))
                except OSError as error:
                    self._log.warn(f"the old checkpoint of step {step} in {self._run} stays ({error.strerror})")

    def _steps(self) -> list[int]:
        """Of the checkpoints that the manager knows and this has not deleted."""
        return sorted({*self._manager.all_steps()} - self._deleted) if self._manager else []

    def _look_for_deleted(self, step: int) -> None:
        """Tell that somebody has deleted checkpoints, or all of the folder; both are made again."""
        if self._manager is None:
            return
        there = home(self._run)
        missing = [each for each in self._steps() if not (there / str(each)).is_dir()]
        if not any(allgather(bool(missing) or not there.is_dir())):
            return
        if missing:
            steps = ", ".join(map(str, missing))
            self._log.alarm(step, f"checkpoints of steps {steps} in {self._run / FOLDER} were deleted during the run")
        self._close()
        self._manager = self._new_manager()

    def _latest(self) -> int | None:
        return None if self._manager is None else self._manager.latest_step()

    def _close(self) -> None:
        if self._manager is not None:
            with suppress(Exception):  # the same again
                self._manager.close()

    def _tell_failure(self, step: int, reason: str, cure: str) -> None:
        self._failed += 1
        self.last_failure = reason, cure
        newest = self._latest()
        there = "none is there yet" if newest is None else f"the newest is of step {newest}"
        text = f"the checkpoint of step {step} was not saved ({reason}), {there}: {cure}"
        self._log.alarm(step, text, failed_saves=self._failed)
        goes_on = "starts again" if newest is None else f"goes on from step {newest}"
        self._lost = (
            f"log.dir={self._run}: its last checkpoint, of step {step}, was not saved ({reason}): "
            f"{cure}, or use another log.dir; the same command then {goes_on}"
        )

    def _new_manager(self) -> Any:
        """None, and the reason in `_unwritable`, if the folder cannot be written; before orbax finds that out, which
        leaves threads and other processes waiting.
        """
        folder, self._unwritable = home(self._run), ""
        if is_main_process():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                check_writable(folder / "test")
            except OSError as error:
                self._unwritable = error.strerror or str(error)
        if any(allgather(bool(self._unwritable))):
            self._unwritable = self._unwritable or "process 0 cannot write it"
            return None
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # or what stands in damaged folders would be read
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._meeting),
        )
        return _Manager(folder, options=options)


class _Manager(ocp.CheckpointManager):
    """Not told that a run is to end, for then orbax subtracts a checkpoint's time from now, and fails where it has not
    read that time (`lightweight_initialize`).
    """

    def reached_preemption(self, step: int) -> bool:
        return False


@contextmanager
def _silent_orbax() -> Iterator[None]:
    """Without the stacks that its threads print of errors which it also raises, some when what they left is cleared."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook

    def unraisable(error: Any) -> None:
        if "Event loop is closed" not in str(error.exc_value):  # as for writes that end behind the first that failed
            hook(error)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
