"""Writing checkpoints to a disk with orbax, in the background."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from moe_jax.checkpoint.save_barrier import SaveBarrier

_SHARED_BYTES = 2**20  # of an array that its replicas write together, the least that each writes


class OrbaxWriter(ocp.CheckpointManager):
    """orbax's manager, which is not asked whether the run is being preempted.

    If it is, orbax subtracts a checkpoint's time from now, and fails where it has not read that time
    (`lightweight_initialize`).
    """

    def __init__(self, folder: Path, barrier: SaveBarrier):
        """`folder` exists and can be written: otherwise orbax leaves threads and other processes waiting."""
        # orbax compiles a program for each part of an array: smaller parts take longer to cut than to write
        handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SHARED_BYTES)
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        options = ocp.CheckpointManagerOptions(
            lightweight_initialize=True,  # otherwise orbax reads files in damaged folders
            async_options=ocp.AsyncOptions(barrier_sync_fn=barrier),
        )
        super().__init__(folder, options=options)

    def reached_preemption(self, step: int) -> bool:
        return False

    def write(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Begin to save a state and a record."""
        items = {"state": ocp.args.StandardSave(state), "record": ocp.args.JsonSave(record)}
        self.save(step, args=ocp.args.Composite(**items), force=True)


@contextmanager
def silent_orbax() -> Iterator[None]:
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
