"""Identity of a run and of its training data, by an ID and checksums and not by the names of files and folders."""

import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.checkpoint.files import saved_run_id
from moe_jax.checkpoint.record import Record, read_record
from moe_jax.checkpoint.storage import storage_of
from moe_jax.config import DataConfig
from moe_jax.data.sources import Tokens
from moe_jax.data.tokens import SPLITS
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import CheckpointError

_LARGE = 2**28  # bytes; a .txt file of this size is read again only if its modification time has changed


class Identity(NamedTuple):
    """The identity stored in the records of checkpoints; the same on all processes."""

    run: str  # random ID, the same each time that the run is started
    # CRC-32 of the tokens of each split, and size and times of a .txt file; of a mixture a list of these, as `sources`
    text: Mapping[str, Any]

    @property
    def train_checksums(self) -> list[int]:
        """The checksum of the tokens to train on, of each source."""
        return [text["train"] for text in _texts(self.text)]


def identity_of(folder: Path, first_step: int, sources: Sequence[Tokens]) -> Identity:
    """The identity of the run that resumes in a folder, or of a new one. Process 0 reads it; all processes call it."""
    found: Identity | None = None
    if is_main_process():
        record = _record(folder, first_step)
        saved = saved_run_id(folder) if first_step else ""
        run = saved or (record.run if record else None) or secrets.token_hex(8)
        texts = _texts(record.text) if record and record.text else []
        known = texts if len(texts) == len(sources) else [None] * len(sources)
        found_texts = [_text_of(tokens, text) for tokens, text in zip(sources, known, strict=True)]
        found = Identity(run, found_texts[0] if len(sources) == 1 else {"sources": found_texts})
    return Identity(*from_process(0, found))


def check_text(
    identity: Identity,
    record: Record,
    run: Path,
    data: DataConfig,
    splits: Sequence[str] = SPLITS,
    cure: str = "use another log.dir",
) -> str:
    """Raise CheckpointError if a checkpoint has other tokens of these splits. Returns a warning if that is not known.

    That both have equally many sources is checked before (checkpoint/compatibility.py). `cure` is for users who want
    the other tokens.
    """
    paths = [f"{name}={source.path}" for name, source in zip(data.path_names, data.mixture, strict=True)]
    if record.text is None:
        return (
            f"the checkpoint of step {record.step} in log.dir={run} has no checksum of its data, as of an older "
            f"version: whether {', '.join(paths)} still has the tokens that it was trained on is not known"
        )
    for path, saved, own in zip(paths, _texts(record.text), _texts(identity.text), strict=True):
        for split in splits:
            if saved.get(split) != own[split]:
                what = "train" if split == "train" else "validate"
                raise CheckpointError(
                    f"{path} has other tokens to {what} on than those of the checkpoint of step {record.step} in "
                    f"log.dir={run}: give it the text that the run began with (and its data.validation_fraction), or "
                    f"{cure}"
                )
    return ""


def _texts(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The checksums of each source."""
    found: list[Mapping[str, Any]] = text.get("sources", [text])
    return found


def _record(folder: Path, step: int) -> Record | None:
    try:
        return read_record(storage_of(folder), step) if step else None
    except ValueError:  # damaged: the error is raised where the checkpoint is restored
        return None


def _text_of(tokens: Tokens, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """The checksums of tokens; those `known` if a large .txt file has not changed since."""
    if tokens.meta is not None:
        return {split: tokens.meta.crc32(split) for split in SPLITS}
    facts = tokens.path.stat()
    file = [len(tokens.train), facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]
    if known and facts.st_size >= _LARGE and known.get("file") == file:
        return dict(known)
    return {split: zlib.crc32(getattr(tokens, split).data) for split in SPLITS} | {"file": file}
