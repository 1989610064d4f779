"""Quarantine of damaged checkpoints: they are moved to another folder, and never deleted."""

import itertools
from contextlib import suppress
from pathlib import Path

from moe_jax.checkpoint.files import FOLDER
from moe_jax.errors import CheckpointError

QUARANTINE = "quarantine"  # below the checkpoints
REASON = "reason.txt"


def quarantine(run: Path, step: int, reason: str) -> Path:
    """Move a checkpoint to the quarantine folder, add the reason to its files, and return its new path.

    Raises CheckpointError if it cannot be moved.
    """
    checkpoint, home = run / FOLDER / str(step), run / FOLDER / QUARANTINE
    names = itertools.chain([str(step)], (f"{step}.{number}" for number in itertools.count(2)))
    target = next(home / name for name in names if not (home / name).exists())
    try:
        home.mkdir(exist_ok=True)
        with suppress(OSError):  # on a full disk, moving it matters more than the reason
            (checkpoint / REASON).write_text(reason + "\n")
        checkpoint.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged ({reason}) and cannot be moved to {home} ({error.strerror}): "
            "move it away yourself, or use another log.dir"
        ) from None
    return target
