"""The folder of a run: checks that it can be used and is shared, its lock, and the step from which the run resumes.

Nothing but the lock is written.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.files import FOLDER, saved_run_id
from moe_jax.checkpoint.latest import SHOWN_S, agreed_newest
from moe_jax.config import Config
from moe_jax.distributed.processes import allgather, from_process, is_main_process
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.files.local_copy import download_again, local_path, url_of
from moe_jax.files.object_store import ObjectFolder, StoreError
from moe_jax.files.places import place_of
from moe_jax.files.upload import Uploads
from moe_jax.paths import checkpoint_path_problem
from moe_jax.run.bucket_lock import BucketLock
from moe_jax.run.run_lock import FolderLock
from moe_jax.telemetry.run_log import MetricsError, RecordedSteps, recorded_steps

_POLL_S = 0.5


def check_is_not_a_copy(config: str, log_dir: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError if a config is that in the folder of a run and names another folder, as in a copy of a run.

    `log_dir` is what it names, if no override does.
    """
    path = local_path(config)
    folder = path if path.is_dir() else path.parent if path.name == "config.yaml" else None
    if folder is None or not saved_run_id(folder) or any(each.startswith("log.dir=") for each in overrides):
        return
    own = place_of(folder)
    if own != log_dir and (url_of(folder) or os.path.realpath(own) != os.path.realpath(log_dir)):
        raise ConfigError(
            f"log.dir={log_dir} in {own}/config.yaml is not the folder of this config, as in a run that was copied or "
            f"moved: give log.dir={own} to train here, or log.dir={log_dir} to train there"
        )


def resume_step(config: Config, folder: Path, damaged: dict[int, str]) -> int:
    """The step from which a run resumes, 0 for a new run. Steps of damaged checkpoints are added to `damaged`.

    All processes call it. Raises UserError if the folder belongs to another run, or is not the same on all processes.
    """
    step = agreed_newest(folder, damaged)
    if step is None:
        return 0
    if not config.checkpoint.resume:
        raise CheckpointError(
            f"log.dir={folder} holds checkpoints up to step {step} and checkpoint.resume=false would overwrite them: "
            "use another log.dir, or checkpoint.resume=true"
        )
    check_same_run(config, folder, step=step)
    if step > config.train.steps:
        raise CheckpointError(
            f"train.steps={config.train.steps}, but log.dir={folder} has a checkpoint of step {step} already: "
            f"use train.steps={step} or more, or another log.dir"
        )
    steps_in_records(folder)  # before anything is written, as damaged records end a run
    return step


def steps_in_records(folder: Path) -> RecordedSteps:
    """The steps in a run's records, which process 0 reads. All processes call it, and all raise its MetricsError."""
    found, problem = RecordedSteps(0, frozenset()), ""
    if is_main_process():
        try:
            found = recorded_steps(folder)
        except MetricsError as error:
            problem = str(error)
    last, validated, problem = from_process(0, [found.last, sorted(found.validated), problem])
    if problem:
        raise MetricsError(problem)
    return RecordedSteps(last, frozenset(validated))


def check_is_shared(folder: Path, run_id: str) -> None:
    """Raise ConfigError on all processes unless all see the folder in which process 0 has written the run's ID.

    All of them call it. Otherwise, each host would write its part of the checkpoints into a folder of its own. The
    copies of a folder in a bucket need not be shared.
    """
    if url_of(folder):
        return
    allgather(0)  # a barrier: process 0 has written
    ends = time.monotonic() + SHOWN_S
    while (found := saved_run_id(folder)) != run_id and time.monotonic() < ends:
        time.sleep(_POLL_S)
    if missing := [process for process, sees in enumerate(allgather(found == run_id)) if not sees]:
        raise ConfigError(
            f"log.dir={folder} is not the same folder on all processes (not seen by {_listed(missing)}): put log.dir "
            "on a disk that all share, or in a bucket"
        )


def _listed(processes: Sequence[int]) -> str:
    """The numbers of processes in words, of many only the first ones."""
    shown = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"


@contextmanager
def lock_run_dir(config: Config) -> Iterator[Callable[[], None]]:
    """Context manager with the lock of `log.dir`, which process 0 takes for all processes. All of them call it.

    Yields a function that raises ConfigError once another run has taken over the lock. Raises ConfigError if another
    run has the lock, or if the folder cannot be created. Files of a folder in a bucket are uploaded until it ends.
    """
    folder, problem, check = local_path(config.log.dir), "", _no_check
    with ExitStack() as closing:
        if is_main_process():
            try:
                lock = _lock(folder)
                closing.enter_context(lock)
                check = lock.check
            except (ConfigError, StoreError) as error:
                problem = str(error)
        if found := from_process(0, problem):
            raise ConfigError(found)
        download_again(folder)  # the run that had the lock may have uploaded something since
        closing.enter_context(Uploads(folder))
        yield check


def _lock(folder: Path) -> FolderLock | BucketLock:
    """The lock of a folder that can be used. Raises ConfigError and StoreError."""
    if (url := url_of(folder)) is None:
        check_folder(folder)
        return FolderLock(folder)
    ObjectFolder(url).check(writes=True)
    return BucketLock(url)


def _no_check() -> None:
    """The check of the processes without a lock."""


def check_folder(folder: Path, name: str = "log.dir") -> None:
    """Raise ConfigError if the folder cannot be created or written, or if its path is unsuitable for checkpoints.

    `name` is the setting or option that names the folder.
    """
    if reason := checkpoint_path_problem(str(folder)):
        raise ConfigError(f"{name}={folder} can have no checkpoints ({reason}): use another name")
    existing = folder
    try:
        while not existing.exists():
            existing = existing.parent
    except OSError as error:
        raise ConfigError(f"{name}={folder} cannot be created ({error.strerror}): name another folder") from None
    if not existing.is_dir():
        raise ConfigError(f"{name}={folder} cannot be created ({existing} is a file): name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}={folder} cannot be created (no right to write in {existing}): name another folder")
    checkpoints = folder / FOLDER
    if checkpoints.is_dir() and not os.access(checkpoints, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name}={folder} cannot have more checkpoints (no right to write in {checkpoints}): make it writable, or "
            "name another folder"
        )
