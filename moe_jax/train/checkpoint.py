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

from moe_jax.errors import CheckpointError, is_full_disk
from moe_jax.plan.plan_text import size
from moe_jax.train.checkpoint_arrays import leaves_of
from moe_jax.train.checkpoint_files import FOLDER, first_line
from moe_jax.train.checkpoint_record import Record
from moe_jax.train.digest import agreed
from moe_jax.train.metrics import RunLog
from moe_jax.train.processes import allgather
from moe_jax.train.save_meeting import SaveMeeting

LEFT_FREE = 10**6  # bytes of the disk, for what else a run writes


class Checkpoints:
    """The checkpoints below a run's folder. A context: leaving it waits for a save under way.

    A save that fails is told, recorded as an alarm and counted, and the run goes on; CheckpointError is raised on
    leaving if it was the last one. `digests` makes those of a state, `about` is what records say of the run.
    """

    def __init__(
        self, run: Path, keep: int, log: RunLog, digests: Callable[[Any], jax.Array], about: Mapping[str, Any]
    ):
        self._run, self._keep, self._log, self._digests, self._about = run, keep, log, digests, about
        self._under_way: int | None = None  # the step of the save that may not be done yet
        self._problem: Exception | None = None  # with which it could not even begin
        self._failed, self._lost = 0, ""  # saves, and why the last one failed if it did
        self.last_failure = "", ""  # of any save: the reason and the cure
        self._meeting, self._leaving = SaveMeeting(), ExitStack()

    def __enter__(self) -> "Checkpoints":
        self._leaving.enter_context(_silent_orbax())
        self._manager = self._new_manager()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._leaving:
            if error is None:  # or the others do not come here
                self._finish()
            with suppress(Exception):  # what ended the run is told, or that the last save failed
                self._manager.close()
        if error is None and self._lost:
            raise CheckpointError(self._lost)

    def newest(self) -> int | None:
        """The last step saved, once it is on the disk; None: there is none. What went wrong with the save is told."""
        self._finish()
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, state: Any, **host: Any) -> None:
        """Start saving; the state may be donated as soon as this returns. A step that is saved already is kept.

        `host` is what the record has of the run besides arrays: `data`, `tuner`, `recent_losses`. All processes call
        it. What went wrong with the save before is told first. Raises ReplicasError for a state that devices do not
        agree on.
        """
        self._finish()
        if step == self._manager.latest_step():
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._manager.directory).free
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
        except Exception as error:
            problem = problem or error
        if not any(allgather(problem is not None)):
            self._lost = ""
            return
        with suppress(Exception):  # the same again
            self._manager.close()
        self._manager = self._new_manager()  # it clears away what the other has left
        if is_full_disk(problem):
            self._tell_failure(step, "no room on the disk", "make room")
        else:
            self._tell_failure(step, first_line(problem) if problem else "another process failed", "see to its disk")

    def _tell_failure(self, step: int, reason: str, cure: str) -> None:
        self._failed += 1
        self.last_failure = reason, cure
        newest = self._manager.latest_step()
        there = "none is there yet" if newest is None else f"the newest is of step {newest}"
        text = f"the checkpoint of step {step} was not saved ({reason}), {there}: {cure}"
        self._log.write({"step": step, "alarm": text, "failed_saves": self._failed})
        self._log.warn(text)
        goes_on = "starts again" if newest is None else f"goes on from step {newest}"
        self._lost = (
            f"log.dir={self._run}: its last checkpoint, of step {step}, was not saved ({reason}): "
            f"{cure}, or use another log.dir; the same command then {goes_on}"
        )

    def _new_manager(self) -> Any:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # or what stands in damaged folders would be read
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._meeting),
        )
        return _Manager((self._run / FOLDER).absolute(), options=options)


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
