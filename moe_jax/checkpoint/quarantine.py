"""Quarantine of damaged checkpoints: they are moved to another folder, and never deleted."""

import itertools
from pathlib import Path

from moe_jax.checkpoint.files import FOLDER
from moe_jax.checkpoint.storage import storage_of
from moe_jax.errors import CheckpointError

QUARANTINE = "quarantine"  # below the checkpoints


def quarantine(run: Path, step: int, reason: str) -> str:
    """Move a checkpoint to the quarantine folder, add the reason to its files, and return its new path.

    Raises CheckpointError if it cannot be moved.
    """
    storage = storage_of(run)
    names = itertools.chain([str(step)], (f"{step}.{number}" for number in itertools.count(2)))
    try:
        target = next(each for each in (f"{QUARANTINE}/{name}" for name in names) if not storage.is_taken(each))
        return storage.move(step, target, reason)
    except OSError as error:
        checkpoint, home = run / FOLDER / str(step), run / FOLDER / QUARANTINE
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged ({reason}) and cannot be moved to {home} ({error.strerror}): "
            "move it away yourself, or use another log.dir"
        ) from None
