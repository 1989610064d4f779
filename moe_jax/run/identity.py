"""Which run a folder holds, and what that is trained on: by numbers, whatever files and folders are called."""

import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.checkpoint.files import checkpoints_dir, saved_run_id
from moe_jax.checkpoint.record import Record, read_record
from moe_jax.data.tokens import SPLITS, Tokens
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import CheckpointError

_LARGE = 2**28  # bytes of a .txt file that is not read again while its time of change is what it was


class Identity(NamedTuple):
    """What checkpoints' records say of it; the same on all processes."""

    run: str  # a random number, kept from start to start
    text: Mapping[str, Any]  # CRC-32 of the tokens trained on and validated with, and facts of a .txt file


def identity_of(folder: Path, first_step: int, tokens: Tokens) -> Identity:
    """Of the run that goes on in a folder, or of a new one, as process 0 finds it; all processes call it."""
    found: Identity | None = None
    if is_main_process():
        record = _record(folder, first_step)
        known = saved_run_id(folder) if first_step else ""
        run = known or (record.run if record else None) or secrets.token_hex(8)
        found = Identity(run, _text_of(tokens, record.text if record else None))
    return Identity(*from_process(0, found))


def check_text(identity: Identity, record: Record, run: Path, path: str) -> str:
    """Raise CheckpointError if a checkpoint was trained on other tokens; returns a warning if that is not known."""
    if record.text is None:
        return (
            f"the checkpoint of step {record.step} in log.dir={run} has no checksum of its data, as of an older "
            f"version: whether data.path={path} still has the tokens that it was trained on is not known"
        )
    for split in SPLITS:
        if record.text.get(split) != identity.text[split]:
            what = "train" if split == "train" else "validate"
            raise CheckpointError(
                f"data.path={path} has other tokens to {what} on than those of the checkpoint of step {record.step} in "
                f"log.dir={run}: give it the text that the run began with (and its data.validation_fraction), or use "
                "another log.dir"
            )
    return ""


def _record(folder: Path, step: int) -> Record | None:
    try:
        return read_record(checkpoints_dir(folder) / str(step)) if step else None
    except ValueError:  # damaged, which is found out where it is read
        return None


def _text_of(tokens: Tokens, known: Mapping[str, Any] | None) -> dict[str, Any]:
    if tokens.meta is not None:
        return {split: tokens.meta.crc32(split) for split in SPLITS}
    facts = tokens.path.stat()
    file = [len(tokens.train), facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]
    if known and facts.st_size >= _LARGE and known.get("file") == file:
        return dict(known)
    return {"train": zlib.crc32(tokens.train.data), "validation": zlib.crc32(tokens.validation.data), "file": file}
